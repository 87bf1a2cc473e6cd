#include "kernels/ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/math.h"
#include "kernels/compression/cpu/compressor.h"
#include "kernels/cpu/plain_rows.h"
#include "kernels/cpu/select.h"
#include "kernels/cpu/task_split.h"
#include "kernels/hyper_connections/cpu/hyper_connections.h"
#include "kernels/linear/cpu/packed_linear.h"
#include "kernels/linear_attention/cpu/gated_delta_net.h"
#include "kernels/linear_attention/cpu/mamba2.h"
#include "kernels/linear_attention/cpu/short_conv.h"
#include "kernels/moe/cpu/cpu_experts.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

using MakeLinearFunction = std::unique_ptr<Linear> (*)(const std::shared_ptr<LinearContext>&,
                                                       std::span<const weights::WeightView>, std::span<const float>);

// Storages of W as elements.
constexpr std::pair<WeightType, MakeLinearFunction> kMakeLinear[] = {
    {WeightType::kBf16, MakeBf16Linear}, {WeightType::kF32, MakeF32Linear}, {WeightType::kF16, MakeF16Linear}};

class CpuOps final : public Ops {
 public:
  CpuOps(std::shared_ptr<ThreadPool> threads, const IsaTable& isa)
      : context_(std::make_shared<LinearContext>(LinearContext{.isa = isa, .threads = std::move(threads)})),
        rows_(isa.rows) {}

  Device& device() const noexcept override { return Cpu(); }
  ThreadPool& threads() const noexcept override { return *context_->threads; }
  bool OnHost() const noexcept override { return true; }

  std::unique_ptr<Linear> MakeLinear(std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                     LinearKind kind) override {
    if (kind.weights == WeightType::kInt8) return MakeInt8Linear(context_, stacked, bias, kind.int16_activations);
    if (kind.weights == WeightType::kInt4) return MakeInt4Linear(context_, stacked, bias, kind.int16_activations);
    if (kind.weights == WeightType::kStored) return MakeStoredLinear(context_, stacked, bias, kind.int16_activations);
    for (const auto& [type, make] : kMakeLinear) {
      if (type == kind.weights) return make(context_, stacked, bias);
    }
    throw InputError("a linear layer's weight type is not one of bf16, f32, f16, int8, int4, stored");
  }

  std::unique_ptr<Linear> MakeQuantizedLinear(std::span<const weights::QuantizedView> stacked,
                                              std::span<const float> bias) override {
    return kernels::MakeQuantizedLinear(context_, stacked, bias);
  }

  std::unique_ptr<LinearGroup> MakeGroup(std::vector<std::unique_ptr<Linear>>&& /*layers*/) override { return nullptr; }

  void Embed(const Linear& table, int64_t first, const int32_t* ids, int64_t rows, float* out) noexcept override {
    const int64_t width = table.In();
    ForRows(rows, width, [&](int64_t row) {
      const int64_t index = ids[row] - first;
      if (index >= 0 && index < table.Out()) table.DequantizeRow(index, out + row * width);
    });
  }

  void PickParts(const float* x, const parallel::Partition& parts, const int32_t* ids, int64_t rows, int64_t width,
                 float* out) noexcept override {
    ForRows(rows, width, [&](int64_t row) {
      std::copy_n(x + (row * parts.ranks + parts.RankOf(ids[row])) * width, width, out + row * width);
    });
  }

  void RmsNorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
               float* out, int64_t out_stride) noexcept override {
    ForRows(rows, width,
            [&](int64_t row) { rows_.rms_norm(x + row * x_stride, weight, eps, width, out + row * out_stride); });
  }

  void AddRmsNorm(float* x, const float* y, const float* weight, float eps, int64_t rows, int64_t width, float* out,
                  const Linear* /*reader*/) noexcept override {
    ForRows(rows, width, [&](int64_t row) {
      float* sum = x + row * width;
      if (y != nullptr) rows_.add(sum, y + row * width, width);
      rows_.rms_norm(sum, weight, eps, width, out + row * width);
    });
  }

  void LayerNorm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps, int64_t rows,
                 int64_t width, float* out, int64_t out_stride) noexcept override {
    ForRows(rows, width, [&](int64_t row) {
      float* to = out + row * out_stride;
      SubtractMean(x + row * x_stride, width, to);
      rows_.rms_norm(to, weight, eps, width, to);
      if (bias != nullptr) rows_.add(to, bias, width);
    });
  }

  void Copy(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* out,
            int64_t out_stride) noexcept override {
    ForRows(rows, width, [&](int64_t row) { std::copy_n(x + row * x_stride, width, out + row * out_stride); });
  }

  void Gather(const float* x, int64_t width, const int64_t* rows, int64_t count, float* out) noexcept override {
    ForRows(count, width, [&](int64_t i) { std::copy_n(x + rows[i] * width, width, out + i * width); });
  }

  void Add(float* x, const float* y, int64_t n) noexcept override {
    ForChunks(n, [&](int64_t first, int64_t count) { rows_.add(x + first, y + first, count); });
  }

  void Rope(float* x, int64_t stride, int64_t rows, int heads, int head_dim, int rotary_dim, RopeKind kind,
            const float* cos_sin, const int64_t* positions) noexcept override {
    const auto rotate = kind.inverse ? RotateBack : kind.interleaved ? rows_.rope_interleaved : rows_.rope;
    ForRows(rows, int64_t{heads} * rotary_dim, [&](int64_t row) {
      const int64_t position = positions[row] / kind.row_tokens * kind.row_tokens;
      rotate(x + row * stride, heads, head_dim, rotary_dim / 2, cos_sin + position * rotary_dim);
    });
  }

  void ActivateMul(Activation activation, float limit, const float* gate_up, int64_t rows, int64_t width, float* out,
                   const Linear* /*reader*/) noexcept override {
    const ActivateMulKernel multiply = rows_.ActivateMul(activation);
    ForRows(rows, width, [&](int64_t row) {
      const float* gate = gate_up + row * 2 * width;
      if (limit != 0) return LimitedSiluMulRow(multiply, gate, gate + width, limit, width, out + row * width);
      multiply(gate, gate + width, width, out + row * width);
    });
  }

  void Activate(Pointwise activation, const Xielu& xielu, float* x, int64_t n) noexcept override {
    ForChunks(n, [&](int64_t first, int64_t count) { ActivateRow(activation, xielu, x + first, count); });
  }

  void MulGate(GateFunction function, float* x, int64_t x_stride, const float* gate, int64_t gate_stride, int64_t rows,
               int64_t width, int64_t channels) noexcept override {
    ForRows(rows, width, [&](int64_t row) {
      float* to = x + row * x_stride;
      const float* by = gate + row * gate_stride;
      if (channels == 1 && function == GateFunction::kSigmoid) return rows_.mul_sigmoid(to, by, width);
      for (int64_t i = 0; i < width; i += channels)
        rows_.scale(to + i, GateFactor(function, by[i / channels]), channels);
    });
  }

  void GatedDeltaNet(const GatedDeltaNetOp& op) noexcept override {
    CpuGatedDeltaNet(op, context_->isa, *context_->threads);
  }

  void ShortConv(const ShortConvOp& op) noexcept override { CpuShortConv(op, context_->isa, *context_->threads); }
  void Compress(const CompressorOp& op) noexcept override { kernels::Compress(op, threads()); }
  void MakeStreamWeights(const HyperConnectionShape& shape, const StreamParameters& parameters, int64_t rows,
                         float* weights) noexcept override {
    kernels::MakeStreamWeights(shape, parameters, rows, threads(), weights);
  }
  void CollapseStreams(const HyperConnectionShape& shape, const float* streams, const float* weights, int64_t rows,
                       float* out) noexcept override {
    kernels::CollapseStreams(shape, streams, weights, rows, threads(), out);
  }
  void ExpandStreams(const HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                     float* streams) noexcept override {
    kernels::ExpandStreams(shape, weights, x, rows, threads(), streams);
  }
  void KeepExperts(float* logits, int64_t rows, int32_t experts, const int32_t* tokens, const int32_t* experts_of_token,
                   int32_t of_token) noexcept override {
    ForRows(rows, experts, [&](int64_t row) {
      const int32_t* kept = experts_of_token + int64_t{tokens[row]} * of_token;
      for (int32_t expert = 0; expert < experts; ++expert) {
        const bool is_kept = std::find(kept, kept + of_token, expert) != kept + of_token;
        if (!is_kept) logits[row * experts + expert] = -std::numeric_limits<float>::infinity();
      }
    });
  }
  void CutOffAbove(float* x, int64_t stride, int64_t rows, int64_t width, float limit) noexcept override {
    ForRows(rows, width, [&](int64_t row) { CutOffRowAbove(x + row * stride, width, limit); });
  }
  void Mamba2(const Mamba2Op& op) noexcept override { CpuMamba2(op, context_->isa, *context_->threads); }

  void AddGated(float* x, const float* y, const float* gate, int64_t rows, int64_t width) noexcept override {
    ForRows(rows, width, [&](int64_t row) {
      const float factor = 1.0F / (1.0F + std::exp(-gate[row]));
      rows_.add_scaled(x + row * width, y + row * width, factor, width);
    });
  }

  std::unique_ptr<ExpertLayer> MakeExperts(std::vector<ExpertWeights>&& experts, const MoeConfig& moe,
                                           const RouterVectors& router, const ExpertDivision& division) override {
    return MakeCpuExperts(context_, std::move(experts), moe, router, division);
  }

  void Scale(float* x, float factor, int64_t n) noexcept override {
    ForChunks(n, [&](int64_t first, int64_t count) { rows_.scale(x + first, factor, count); });
  }

  void ScaleRows(float* x, int64_t stride, int64_t rows, int64_t width, const float* factors,
                 const int64_t* positions) noexcept override {
    ForRows(rows, width, [&](int64_t row) { rows_.scale(x + row * stride, factors[positions[row]], width); });
  }

  void ScaleColumns(float* x, int64_t stride, int64_t rows, int64_t width, float factor) noexcept override {
    ForRows(rows, width, [&](int64_t row) { rows_.scale(x + row * stride, factor, width); });
  }

  void Softcap(float* x, int64_t rows, int64_t width, float softcap, RowArgmax* argmaxes) noexcept override {
    if (softcap != 0) {
      ForChunks(rows * width, [&](int64_t first, int64_t count) { rows_.softcap(x + first, softcap, count); });
    }
    if (argmaxes == nullptr) return;
    ForRows(rows, width, [&](int64_t row) {
      const float* values = x + row * width;
      const float largest = rows_.max(values, width);
      const bool finite = !std::isnan(largest);
      const auto column = finite ? static_cast<int32_t>(std::find(values, values + width, largest) - values) : 0;
      argmaxes[row] = {.value = largest, .column = column, .finite = finite};
    });
  }

  // The host has no launches, and its sampler reads the logits.
  std::unique_ptr<LaunchGraph> Capture(const std::function<void()>& /*launches*/) override { return nullptr; }
  void Sample(const float* /*logits*/, int64_t /*rows*/, int64_t /*width*/, const RowArgmax* /*argmaxes*/,
              const SampleParams* /*params*/, int32_t* /*tokens*/) noexcept override {}

 private:
  // Calls fn(row) for every row of `width` values, in parallel where it pays.
  template <class Function>
  void ForRows(int64_t rows, int64_t width, Function fn) noexcept {
    ForParts(*context_->threads, rows, width, [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; ++row) fn(row);
    });
  }

  // Calls fn(first, count) for parts of `values` values, in parallel where it pays.
  template <class Function>
  void ForChunks(int64_t values, Function fn) noexcept {
    ForRows(CeilDiv(values, kMinTaskValues), kMinTaskValues, [&](int64_t chunk) {
      const int64_t first = chunk * kMinTaskValues;
      fn(first, std::min(kMinTaskValues, values - first));
    });
  }

  std::shared_ptr<LinearContext> context_;
  const RowKernels& rows_;
};

}  // namespace

std::unique_ptr<Ops> MakeCpuOps(std::shared_ptr<ThreadPool> threads, const IsaTable& isa) {
  return std::make_unique<CpuOps>(std::move(threads), isa);
}

std::unique_ptr<Ops> MakeCpuOps(std::shared_ptr<ThreadPool> threads, const char* isa) {
  return MakeCpuOps(std::move(threads), SelectIsa(isa));
}

}  // namespace kvanta::kernels
