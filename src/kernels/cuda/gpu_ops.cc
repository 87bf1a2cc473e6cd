#include <algorithm>
#include <utility>

#include "kernels/cuda/cuda_context.h"
#include "kernels/linear/cuda/gpu_linear_group.h"
#include "kernels/linear_attention/cuda/gpu_recurrent.h"
#include "kernels/moe/cuda/gpu_experts.h"

namespace kvanta::kernels {
namespace {

class GpuOps final : public Ops {
 public:
  GpuOps(std::shared_ptr<CudaContext> gpu, std::shared_ptr<ThreadPool> threads)
      : context_(std::make_shared<GpuLinearContext>(
            GpuLinearContext{.gpu = std::move(gpu), .threads = std::move(threads)})) {}

  Device& device() const noexcept override { return context_->gpu->device(); }
  ThreadPool& threads() const noexcept override { return *context_->threads; }
  bool OnHost() const noexcept override { return false; }

  std::unique_ptr<Linear> MakeLinear(std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                     LinearKind kind) override {
    return std::make_unique<GpuLinear>(context_, stacked, bias, kind);
  }

  std::unique_ptr<Linear> MakeQuantizedLinear(std::span<const weights::QuantizedView> stacked,
                                              std::span<const float> bias) override {
    const auto format_of = [](const weights::QuantizedView& view) {
      return view.weight->Order().empty() ? weights::FindKernelFormat(view.weight->Format(), view.weight->In()) : -1;
    };
    const int format = format_of(stacked.front());
    const bool is_one = std::ranges::all_of(stacked, [&](const auto& view) { return format_of(view) == format; });
    if (format < 0 || !is_one || !cuda::PanelKindOf(weights::kKernelFormats[format])) return nullptr;
    return std::make_unique<GpuLinear>(context_, stacked, bias, weights::kKernelFormats[format]);
  }

  std::unique_ptr<LinearGroup> MakeGroup(std::vector<std::unique_ptr<Linear>>&& layers) override {
    return std::make_unique<GpuLinearGroup>(context_, std::move(layers));
  }

  void LayerNorm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps, int64_t rows,
                 int64_t width, float* out, int64_t out_stride) noexcept override {
    Run(rows * width, cuda::NormOp{.x = x,
                                   .x_stride = x_stride,
                                   .weight = weight,
                                   .bias = bias,
                                   .subtracts_mean = true,
                                   .eps = eps,
                                   .rows = rows,
                                   .width = width,
                                   .out = out,
                                   .out_stride = out_stride});
  }

  void Activate(Pointwise activation, const Xielu& xielu, float* x, int64_t n) noexcept override {
    Run(n, cuda::ActivateOp{.activation = activation, .xielu = xielu, .x = x, .count = n});
  }

  void MulGate(GateFunction function, float* x, int64_t x_stride, const float* gate, int64_t gate_stride, int64_t rows,
               int64_t width, int64_t channels) noexcept override {
    Run(rows * width, cuda::MulOp{.x = x,
                                  .x_stride = x_stride,
                                  .by = gate,
                                  .by_stride = gate_stride,
                                  .by_gate = true,
                                  .function = function,
                                  .rows = rows,
                                  .width = width,
                                  .channels = channels});
  }

  void GatedDeltaNet(const GatedDeltaNetOp& op) noexcept override { GpuGatedDeltaNet(op, *context_->gpu); }
  void ShortConv(const ShortConvOp& op) noexcept override { GpuShortConv(op, *context_->gpu); }
  void Mamba2(const Mamba2Op& op) noexcept override { GpuMamba2(op, *context_->gpu); }
  void Compress(const CompressorOp& op) noexcept override {
    const cuda::DeviceStates states = cuda::DeviceStatesOf(op.states);
    if (op.entries != nullptr) {
      Run(op.rows, cuda::MakeEntriesOp{.states = states,
                                       .shape = op.shape,
                                       .inputs = op.inputs,
                                       .positions = op.positions,
                                       .rows = op.rows,
                                       .entry_bias = op.entry_bias,
                                       .key_bias = op.key_bias,
                                       .entries = op.entries,
                                       .keys = op.keys});
    }
    Run(states.max_sequences,
        cuda::KeepInputsOp{.states = states, .shape = op.shape, .inputs = op.inputs, .positions = op.positions});
  }

  void MakeStreamWeights(const HyperConnectionShape& shape, const StreamParameters& parameters, int64_t rows,
                         float* weights) noexcept override {
    Run(rows, cuda::StreamWeightsOp{.shape = shape, .parameters = parameters, .rows = rows, .weights = weights});
  }
  void CollapseStreams(const HyperConnectionShape& shape, const float* streams, const float* weights, int64_t rows,
                       float* out) noexcept override {
    Run(rows,
        cuda::CollapseStreamsOp{.shape = shape, .streams = streams, .weights = weights, .rows = rows, .out = out});
  }
  void ExpandStreams(const HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                     float* streams) noexcept override {
    Run(rows, cuda::ExpandStreamsOp{.shape = shape, .weights = weights, .x = x, .rows = rows, .streams = streams});
  }

  void KeepExperts(float* logits, int64_t rows, int32_t experts, const int32_t* tokens, const int32_t* experts_of_token,
                   int32_t of_token) noexcept override {
    Run(rows, cuda::KeepExpertsOp{.logits = logits,
                                  .rows = rows,
                                  .experts = experts,
                                  .tokens = tokens,
                                  .experts_of_token = experts_of_token,
                                  .of_token = of_token});
  }
  void CutOffAbove(float* x, int64_t stride, int64_t rows, int64_t width, float limit) noexcept override {
    Run(rows * width, cuda::CutOffOp{.x = x, .stride = stride, .rows = rows, .width = width, .limit = limit});
  }

  std::unique_ptr<ExpertLayer> MakeExperts(std::vector<ExpertWeights>&& experts, const MoeConfig& moe,
                                           const RouterVectors& router, const ExpertDivision& division) override {
    return MakeGpuExperts(context_, std::move(experts), moe, router, division);
  }

  void Embed(const Linear& table, int64_t first, const int32_t* ids, int64_t rows, float* out) noexcept override {
    const auto& linear = static_cast<const GpuLinear&>(table);  // from MakeLinear
    Run(rows, cuda::EmbedOp{.table = linear.weight(), .ids = ids, .id = first, .rows = rows, .out = out});
  }

  void PickParts(const float* x, const parallel::Partition& parts, const int32_t* ids, int64_t rows, int64_t width,
                 float* out) noexcept override {
    Run(rows * width, cuda::PickPartsOp{.x = x, .parts = parts, .ids = ids, .rows = rows, .width = width, .out = out});
  }

  void RmsNorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
               float* out, int64_t out_stride) noexcept override {
    Run(rows * width, cuda::NormOp{.x = x,
                                   .x_stride = x_stride,
                                   .weight = weight,
                                   .eps = eps,
                                   .rows = rows,
                                   .width = width,
                                   .out = out,
                                   .out_stride = out_stride});
  }

  void AddRmsNorm(float* x, const float* y, const float* weight, float eps, int64_t rows, int64_t width, float* out,
                  const Linear* reader) noexcept override {
    Run(rows * width, cuda::AddNormOp{.x = x,
                                      .y = y,
                                      .weight = weight,
                                      .eps = eps,
                                      .rows = rows,
                                      .width = width,
                                      .out = out,
                                      .pack = Prepack(reader, out, rows)});
  }

  void Copy(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* out,
            int64_t out_stride) noexcept override {
    Run(rows * width, cuda::CopyOp{.x = x,
                                   .x_stride = x_stride,
                                   .ids = nullptr,
                                   .rows = rows,
                                   .width = width,
                                   .out = out,
                                   .out_stride = out_stride});
  }

  void Gather(const float* x, int64_t width, const int64_t* rows, int64_t count, float* out) noexcept override {
    Run(count * width,
        cuda::CopyOp{
            .x = x, .x_stride = width, .ids = rows, .rows = count, .width = width, .out = out, .out_stride = width});
  }

  void Add(float* x, const float* y, int64_t n) noexcept override { Run(n, cuda::AddOp{.x = x, .y = y, .count = n}); }

  void AddGated(float* x, const float* y, const float* gate, int64_t rows, int64_t width) noexcept override {
    Run(rows * width, cuda::AddOp{.x = x, .y = y, .count = rows * width, .gate = gate, .width = width});
  }

  void Rope(float* x, int64_t stride, int64_t rows, int heads, int head_dim, int rotary_dim, RopeKind kind,
            const float* cos_sin, const int64_t* positions) noexcept override {
    Run(rows * heads * rotary_dim, cuda::RopeOp{.x = x,
                                                .stride = stride,
                                                .rows = rows,
                                                .heads = heads,
                                                .head_dim = head_dim,
                                                .rotary_dim = rotary_dim,
                                                .kind = kind,
                                                .cos_sin = cos_sin,
                                                .positions = positions});
  }

  void ActivateMul(Activation activation, float limit, const float* gate_up, int64_t rows, int64_t width, float* out,
                   const Linear* reader) noexcept override {
    const cuda::ActivateMulOp op{
        .activation = activation, .limit = limit, .gate_up = gate_up, .rows = rows, .width = width, .out = out};
    const cuda::PackTarget pack = Prepack(reader, out, rows);
    if (pack.packs) return Run(rows * width, cuda::ActivatePackOp{.activate = op, .pack = pack});
    Run(rows * width, op);
  }

  void ForwardGated(const Linear& gate_up, const float* x, int64_t rows, Activation activation, float limit,
                    float* both, float* out, const Linear* reader) noexcept override {
    const auto* const linear = dynamic_cast<const GpuLinear*>(&gate_up);
    const GatedForward gated{.activation = activation, .limit = limit, .out = out, .reader = reader};
    if (linear != nullptr && rows > 0 && linear->ForwardGated(x, rows, gated)) return;
    Ops::ForwardGated(gate_up, x, rows, activation, limit, both, out, reader);
  }

  void Scale(float* x, float factor, int64_t n) noexcept override {
    Run(n, cuda::ScaleOp{.x = x, .factor = factor, .count = n});
  }

  void ScaleColumns(float* x, int64_t stride, int64_t rows, int64_t width, float factor) noexcept override {
    Run(rows * width, cuda::ScaleOp{.x = x, .factor = factor, .count = rows * width, .stride = stride, .width = width});
  }

  void ScaleRows(float* x, int64_t stride, int64_t rows, int64_t width, const float* factors,
                 const int64_t* positions) noexcept override {
    Run(rows * width, cuda::ScaleOp{.x = x,
                                    .count = rows * width,
                                    .factors = factors,
                                    .positions = positions,
                                    .stride = stride,
                                    .width = width});
  }

  void Softcap(float* x, int64_t rows, int64_t width, float softcap, RowArgmax* argmaxes) noexcept override {
    if (softcap != 0) Run(rows * width, cuda::SoftcapOp{.x = x, .softcap = softcap, .count = rows * width});
    if (argmaxes == nullptr) return;
    Run(rows, cuda::ArgmaxOp{.x = x, .stride = width, .rows = rows, .width = width, .argmaxes = argmaxes});
  }

  std::unique_ptr<LaunchGraph> Capture(const std::function<void()>& launches) override {
    return context_->gpu->Capture(launches);
  }

  void Sample(const float* logits, int64_t rows, int64_t width, const RowArgmax* argmaxes, const SampleParams* draws,
              int32_t* tokens) noexcept override {
    Run(rows,
        cuda::SampleOp{
            .logits = logits, .rows = rows, .width = width, .argmaxes = argmaxes, .params = draws, .tokens = tokens});
  }

 private:
  // An empty grid would be a launch error.
  void Run(int64_t values, const cuda::ModelOp& op) noexcept {
    if (values > 0) context_->gpu->Run(op);
  }

  std::shared_ptr<GpuLinearContext> context_;
};

}  // namespace

std::unique_ptr<Ops> MakeGpuOps(std::shared_ptr<CudaContext> gpu, std::shared_ptr<ThreadPool> threads) {
  return std::make_unique<GpuOps>(std::move(gpu), std::move(threads));
}

}  // namespace kvanta::kernels
