#include "observe/profile.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "observe/forwarding_backend.h"

namespace kvanta::observe {
namespace {

class Timer {
 public:
  explicit Timer(ProfileRow& row) : row_(row), start_(Now()) {}
  ~Timer() {
    row_.seconds += Now() - start_;
    ++row_.calls;
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  ProfileRow& row_;
  double start_;
};

class ProfiledLinear final : public kernels::Linear {
 public:
  ProfiledLinear(std::unique_ptr<kernels::Linear> inner, ProfileRow& row) : inner_(std::move(inner)), row_(row) {}

  const kernels::Linear& Inner() const noexcept { return *inner_; }
  std::unique_ptr<kernels::Linear> TakeInner() noexcept { return std::move(inner_); }
  int64_t In() const noexcept override { return inner_->In(); }
  int64_t Out() const noexcept override { return inner_->Out(); }
  void Forward(const float* x, int64_t rows, float* y, int64_t y_stride,
               kernels::RowArgmax* argmaxes) const noexcept override {
    const Timer timer(row_);
    inner_->Forward(x, rows, y, y_stride, argmaxes);
  }
  void DequantizeRow(int64_t index, float* out) const noexcept override { inner_->DequantizeRow(index, out); }
  int64_t WeightBytes() const noexcept override { return inner_->WeightBytes(); }
  std::string_view Kind() const noexcept override { return inner_->Kind(); }

 private:
  std::unique_ptr<kernels::Linear> inner_;
  ProfileRow& row_;
};

class ProfiledExperts final : public kernels::ExpertLayer {
 public:
  ProfiledExperts(std::unique_ptr<kernels::ExpertLayer> inner, ProfileRow& row) : inner_(std::move(inner)), row_(row) {}

  void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept override {
    const Timer timer(row_);
    inner_->Forward(x, logits, rows, out);
  }

 private:
  std::unique_ptr<kernels::ExpertLayer> inner_;
  ProfileRow& row_;
};

// "linear q_proj|k_proj|v_proj": the last components of the modules' names.
template <class View>
std::string LinearName(std::span<const View> stacked) {
  std::string name = "linear ";
  for (size_t i = 0; i < stacked.size(); ++i) {
    if (i > 0) name += '|';
    name += stacked[i].module.substr(stacked[i].module.rfind('.') + 1);
  }
  return name;
}

class ProfiledOps final : public kernels::Ops {
 public:
  ProfiledOps(std::unique_ptr<kernels::Ops> inner, std::shared_ptr<StepProfile> profile)
      : inner_(std::move(inner)),
        profile_(std::move(profile)),
        embed_(profile_->Row("embed")),
        norm_(profile_->Row("norm")),
        rope_(profile_->Row("rope")),
        activation_(profile_->Row("activation")),
        softcap_(profile_->Row("logits softcap")),
        copy_(profile_->Row("copy")),
        add_(profile_->Row("add")),
        delta_(profile_->Row("gated delta net")),
        conv_(profile_->Row("short convolution")),
        mamba2_(profile_->Row("mamba-2")),
        compressor_(profile_->Row("compressor")),
        streams_(profile_->Row("hyper-connections")) {}

  Device& device() const noexcept override { return inner_->device(); }
  ThreadPool& threads() const noexcept override { return inner_->threads(); }
  std::unique_ptr<kernels::Linear> MakeLinear(std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                              kernels::LinearKind kind) override {
    ProfileRow& row = profile_->Row(LinearName(stacked));
    return std::make_unique<ProfiledLinear>(inner_->MakeLinear(stacked, bias, kind), row);
  }
  std::unique_ptr<kernels::ExpertLayer> MakeExperts(std::vector<kernels::ExpertWeights>&& experts,
                                                    const kernels::MoeConfig& moe, const kernels::RouterVectors& router,
                                                    const kernels::ExpertDivision& division) override {
    const auto unwrap = [](std::unique_ptr<kernels::Linear>& linear) {  // the parts of a stack are profiled
      if (auto* profiled = dynamic_cast<ProfiledLinear*>(linear.get())) linear = profiled->TakeInner();
    };
    for (kernels::ExpertWeights& expert : experts) {
      unwrap(expert.gate_up);
      unwrap(expert.down);
    }
    return std::make_unique<ProfiledExperts>(inner_->MakeExperts(std::move(experts), moe, router, division),
                                             profile_->Row("experts"));
  }
  std::unique_ptr<kernels::Linear> MakeQuantizedLinear(std::span<const weights::QuantizedView> stacked,
                                                       std::span<const float> bias) override {
    std::unique_ptr<kernels::Linear> linear = inner_->MakeQuantizedLinear(stacked, bias);
    if (!linear) return nullptr;
    return std::make_unique<ProfiledLinear>(std::move(linear), profile_->Row(LinearName(stacked)));
  }
  void Embed(const kernels::Linear& table, int64_t first, const int32_t* ids, int64_t rows,
             float* out) noexcept override {
    const Timer timer(embed_);
    inner_->Embed(static_cast<const ProfiledLinear&>(table).Inner(), first, ids, rows,
                  out);  // MakeLinear made them all
  }
  void PickParts(const float* x, const parallel::Partition& parts, const int32_t* ids, int64_t rows, int64_t width,
                 float* out) noexcept override {
    const Timer timer(embed_);
    inner_->PickParts(x, parts, ids, rows, width, out);
  }
  void RmsNorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
               float* out, int64_t out_stride) noexcept override {
    const Timer timer(norm_);
    inner_->RmsNorm(x, x_stride, weight, eps, rows, width, out, out_stride);
  }
  void AddRmsNorm(float* x, const float* y, const float* weight, float eps, int64_t rows, int64_t width, float* out,
                  const kernels::Linear* reader) noexcept override {
    const Timer timer(norm_);
    inner_->AddRmsNorm(x, y, weight, eps, rows, width, out, reader);
  }
  void LayerNorm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps, int64_t rows,
                 int64_t width, float* out, int64_t out_stride) noexcept override {
    const Timer timer(norm_);
    inner_->LayerNorm(x, x_stride, weight, bias, eps, rows, width, out, out_stride);
  }
  void Copy(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* out,
            int64_t out_stride) noexcept override {
    const Timer timer(copy_);
    inner_->Copy(x, x_stride, rows, width, out, out_stride);
  }
  void Activate(kernels::Pointwise activation, const kernels::Xielu& xielu, float* x, int64_t n) noexcept override {
    const Timer timer(activation_);
    inner_->Activate(activation, xielu, x, n);
  }
  void MulGate(kernels::GateFunction function, float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
               int64_t rows, int64_t width, int64_t channels) noexcept override {
    const Timer timer(activation_);
    inner_->MulGate(function, x, x_stride, gate, gate_stride, rows, width, channels);
  }
  void GatedDeltaNet(const kernels::GatedDeltaNetOp& op) noexcept override {
    const Timer timer(delta_);
    inner_->GatedDeltaNet(op);
  }
  void ShortConv(const kernels::ShortConvOp& op) noexcept override {
    const Timer timer(conv_);
    inner_->ShortConv(op);
  }
  void Compress(const kernels::CompressorOp& op) noexcept override {
    const Timer timer(compressor_);
    inner_->Compress(op);
  }
  void MakeStreamWeights(const kernels::HyperConnectionShape& shape, const kernels::StreamParameters& parameters,
                         int64_t rows, float* weights) noexcept override {
    const Timer timer(streams_);
    inner_->MakeStreamWeights(shape, parameters, rows, weights);
  }
  void CollapseStreams(const kernels::HyperConnectionShape& shape, const float* streams, const float* weights,
                       int64_t rows, float* out) noexcept override {
    const Timer timer(streams_);
    inner_->CollapseStreams(shape, streams, weights, rows, out);
  }
  void ExpandStreams(const kernels::HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                     float* streams) noexcept override {
    const Timer timer(streams_);
    inner_->ExpandStreams(shape, weights, x, rows, streams);
  }
  void KeepExperts(float* logits, int64_t rows, int32_t experts, const int32_t* tokens, const int32_t* experts_of_token,
                   int32_t of_token) noexcept override {
    const Timer timer(activation_);
    inner_->KeepExperts(logits, rows, experts, tokens, experts_of_token, of_token);
  }
  void CutOffAbove(float* x, int64_t stride, int64_t rows, int64_t width, float limit) noexcept override {
    const Timer timer(activation_);
    inner_->CutOffAbove(x, stride, rows, width, limit);
  }
  void Mamba2(const kernels::Mamba2Op& op) noexcept override {
    const Timer timer(mamba2_);
    inner_->Mamba2(op);
  }
  bool OnHost() const noexcept override { return inner_->OnHost(); }
  std::unique_ptr<kernels::LinearGroup> MakeGroup(std::vector<std::unique_ptr<kernels::Linear>>&& layers) override {
    return inner_->MakeGroup(std::move(layers));
  }
  std::unique_ptr<kernels::LaunchGraph> Capture(const std::function<void()>& launches) override {
    return inner_->Capture(launches);
  }
  void Sample(const float* logits, int64_t rows, int64_t width, const kernels::RowArgmax* argmaxes,
              const kernels::SampleParams* draws, int32_t* tokens) noexcept override {
    inner_->Sample(logits, rows, width, argmaxes, draws, tokens);
  }
  void Gather(const float* x, int64_t width, const int64_t* rows, int64_t count, float* out) noexcept override {
    const Timer timer(copy_);
    inner_->Gather(x, width, rows, count, out);
  }
  void Add(float* x, const float* y, int64_t n) noexcept override {
    const Timer timer(add_);
    inner_->Add(x, y, n);
  }
  void AddGated(float* x, const float* y, const float* gate, int64_t rows, int64_t width) noexcept override {
    const Timer timer(add_);
    inner_->AddGated(x, y, gate, rows, width);
  }
  void Rope(float* x, int64_t stride, int64_t rows, int heads, int head_dim, int rotary_dim, kernels::RopeKind kind,
            const float* cos_sin, const int64_t* positions) noexcept override {
    const Timer timer(rope_);
    inner_->Rope(x, stride, rows, heads, head_dim, rotary_dim, kind, cos_sin, positions);
  }
  void ActivateMul(kernels::Activation activation, float limit, const float* gate_up, int64_t rows, int64_t width,
                   float* out, const kernels::Linear* reader) noexcept override {
    const Timer timer(activation_);
    inner_->ActivateMul(activation, limit, gate_up, rows, width, out, reader);
  }
  void Scale(float* x, float factor, int64_t n) noexcept override {
    const Timer timer(embed_);
    inner_->Scale(x, factor, n);
  }
  void ScaleRows(float* x, int64_t stride, int64_t rows, int64_t width, const float* factors,
                 const int64_t* positions) noexcept override {
    const Timer timer(rope_);
    inner_->ScaleRows(x, stride, rows, width, factors, positions);
  }
  void ScaleColumns(float* x, int64_t stride, int64_t rows, int64_t width, float factor) noexcept override {
    const Timer timer(activation_);
    inner_->ScaleColumns(x, stride, rows, width, factor);
  }
  void Softcap(float* x, int64_t rows, int64_t width, float softcap, kernels::RowArgmax* argmaxes) noexcept override {
    const Timer timer(softcap_);
    inner_->Softcap(x, rows, width, softcap, argmaxes);
  }

 private:
  std::unique_ptr<kernels::Ops> inner_;
  std::shared_ptr<StepProfile> profile_;
  ProfileRow &embed_, &norm_, &rope_, &activation_, &softcap_, &copy_, &add_, &delta_, &conv_, &mamba2_, &compressor_,
      &streams_;
};

class ProfiledBackend final : public ForwardingBackend {
 public:
  ProfiledBackend(std::unique_ptr<attention::Backend> inner, std::shared_ptr<StepProfile> profile)
      : ForwardingBackend(std::move(inner)),
        profile_(std::move(profile)),
        plan_(profile_->Row("attention plan")),
        append_(profile_->Row("append")),
        select_(profile_->Row("token selection")),
        run_(profile_->Row("attention")) {}

  std::unique_ptr<attention::Plan> MakePlan(const attention::BatchShape& batch,
                                            std::unique_ptr<attention::Plan> plan) override {
    const Timer timer(plan_);
    return ForwardingBackend::MakePlan(batch, std::move(plan));
  }
  void Append(attention::Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    const Timer timer(append_);
    ForwardingBackend::Append(plan, layer, k, v, kv_stride);
  }
  void Select(attention::Plan& plan, int layer, const float* q, int64_t q_stride,
              const float* weights) noexcept override {
    const Timer timer(select_);
    ForwardingBackend::Select(plan, layer, q, q_stride, weights);
  }
  void Run(attention::Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
           const kernels::Linear* reader) noexcept override {
    const Timer timer(run_);
    ForwardingBackend::Run(plan, layer, q, q_stride, out, reader);
  }

 private:
  std::shared_ptr<StepProfile> profile_;
  ProfileRow &plan_, &append_, &select_, &run_;
};

}  // namespace

ProfileRow& StepProfile::Row(std::string_view name) {
  const auto found = std::ranges::find(rows_, name, &ProfileRow::name);
  if (found != rows_.end()) return *found;
  return rows_.emplace_back(ProfileRow{.name = std::string(name)});
}

std::unique_ptr<kernels::Ops> Profiled(std::unique_ptr<kernels::Ops> ops, std::shared_ptr<StepProfile> profile) {
  return std::make_unique<ProfiledOps>(std::move(ops), std::move(profile));
}

std::unique_ptr<attention::Backend> Profiled(std::unique_ptr<attention::Backend> backend,
                                             std::shared_ptr<StepProfile> profile) {
  return std::make_unique<ProfiledBackend>(std::move(backend), std::move(profile));
}

}  // namespace kvanta::observe
