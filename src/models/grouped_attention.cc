// Grouped-query attention, with optional biases, q/k norms, rope and sinks.
#include <algorithm>

#include "models/layer_blocks.h"

namespace kvanta::models {
namespace {

class GroupedAttention final : public AttentionBlock {
 public:
  GroupedAttention(const BlockSource& source, const std::string& prefix) : ops_(source.ops), config_(source.config) {
    const std::string module = prefix + "self_attn.";
    if (config_.attention_sinks) sinks_ = source.reader.KeptValues(module + "sinks", config_.heads);
    if (config_.qk_norm) {
      const bool all = config_.qk_norm_of_all_heads;
      q_norm_ =
          source.reader.Vector(module + "q_norm.weight", all ? QWidth() : config_.head_dim, config_.norm_weight_offset);
      k_norm_ = source.reader.Vector(module + "k_norm.weight", all ? KvWidth() : config_.head_dim,
                                     config_.norm_weight_offset);
    }
    const auto l2 = [](const LayerSpec& layer) { return layer.qk_l2_norm; };
    if (std::ranges::any_of(config_.layer_specs, l2)) ones_ = Ones(ops_.device(), config_.head_dim);
    const auto read_qkv = [&](std::initializer_list<StackedWeight> stack) {
      return source.reader.Linear(stack, config_.hidden, config_.qkv_bias, {source.store, kInt16Activations});
    };
    if (config_.qkv_fused) {
      qkv_ = read_qkv({{module + "qkv_proj", QkvWidth()}});
    } else {
      qkv_ = read_qkv(
          {{module + "q_proj", QueryProjection()}, {module + "k_proj", KvWidth()}, {module + "v_proj", KvWidth()}});
    }
    out_ = source.reader.Linear({{module + "o_proj", config_.hidden}}, QWidth(), config_.o_bias, source.store);
  }

  std::vector<float> Sinks() const override { return sinks_; }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * QkvWidth());
    attended_ = scratch.Take(rows * QWidth());
    if (config_.attn_output_gate) queries_ = scratch.Take(rows * QWidth());
  }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    const int64_t rows = step.rows;
    qkv_->Forward(x, rows, projected_, QkvWidth());
    const bool gated = config_.attn_output_gate;
    float* k = projected_ + QueryProjection();
    float* v = k + KvWidth();
    if (gated) CopyHeads(rows, projected_, queries_);
    float* q = gated ? queries_ : projected_;
    const int64_t q_stride = gated ? QWidth() : QkvWidth();
    if (config_.qk_norm) {
      Norm(q_norm_, config_.heads, rows, q, q_stride);
      Norm(k_norm_, config_.kv_heads, rows, k, QkvWidth());
    }
    if (step.rope->rotary_dim != 0) {
      Rotate(step, config_.heads, step.query_rope_table, q, q_stride);
      Rotate(step, config_.kv_heads, step.rope_table, k, QkvWidth());
    }
    if (config_.layer_specs[step.layer].qk_l2_norm) {
      Norm(ones_, config_.heads, rows, q, q_stride);
      Norm(ones_, config_.kv_heads, rows, k, QkvWidth());
    }
    if (step.query_scales != nullptr) {
      ops_.ScaleRows(q, q_stride, rows, QWidth(), step.query_scales, step.positions);
    }
    step.backend->Append(*step.plan, step.layer, k, v, QkvWidth());
    step.backend->Run(*step.plan, step.layer, q, q_stride, attended_);
    if (gated) GateHeads(rows);
    out_->Forward(attended_, rows, out, config_.hidden);
  }

 private:
  int64_t QWidth() const { return int64_t{config_.heads} * config_.head_dim; }
  int64_t KvWidth() const { return int64_t{config_.kv_heads} * config_.head_dim; }
  // A head's q, and after it its gate if there is one.
  int64_t QueryProjection() const { return QWidth() * (config_.attn_output_gate ? 2 : 1); }
  int64_t QkvWidth() const { return QueryProjection() + 2 * KvWidth(); }

  static Buffer Ones(Device& device, int64_t size) {
    const std::vector<float> ones(static_cast<size_t>(size), 1.0F);
    Buffer buffer = device.Allocate(ones.size() * sizeof(float));
    device.CopyIn(buffer.data(), ones.data(), buffer.bytes());
    return buffer;
  }

  void Rotate(const AttentionStep& step, int heads, const float* table, float* x, int64_t stride) noexcept {
    ops_.Rope(x, stride, step.rows, heads, config_.head_dim, step.rope->rotary_dim, step.rope->interleaved, table,
              step.positions);
  }

  // Calls visit(first row, rows, head, heads) for all rows of each head or all heads of each row, whichever are fewer.
  template <class Visit>
  void ForHeads(int64_t rows, Visit visit) const noexcept {
    if (rows < config_.heads) {
      for (int64_t row = 0; row < rows; ++row) visit(row, 1, 0, config_.heads);
    } else {
      for (int head = 0; head < config_.heads; ++head) visit(0, rows, head, 1);
    }
  }

  // The q of each head, without the gates between them.
  void CopyHeads(int64_t rows, const float* from, float* to) noexcept {
    const int64_t width = config_.head_dim;
    ForHeads(rows, [&](int64_t row, int64_t count, int64_t head, int64_t heads) {
      const bool one_row = heads > 1;
      ops_.Copy(from + row * QkvWidth() + head * 2 * width, one_row ? 2 * width : QkvWidth(), one_row ? heads : count,
                width, to + row * QWidth() + head * width, one_row ? width : QWidth());
    });
  }

  void GateHeads(int64_t rows) noexcept {
    const int64_t width = config_.head_dim;
    ForHeads(rows, [&](int64_t row, int64_t count, int64_t head, int64_t heads) {
      const bool one_row = heads > 1;
      ops_.MulSigmoid(attended_ + row * QWidth() + head * width, one_row ? width : QWidth(),
                      projected_ + row * QkvWidth() + (2 * head + 1) * width, one_row ? 2 * width : QkvWidth(),
                      one_row ? heads : count, width);
    });
  }

  // Norms x [rows][heads * head_dim] in place: every head, or all heads together. One call per row or per head,
  // whichever is fewer (the bits are the same).
  void Norm(const Buffer& weight, int heads, int64_t rows, float* x, int64_t stride) noexcept {
    const auto eps = static_cast<float>(config_.rms_eps);
    const int64_t width = config_.head_dim;
    if (config_.qk_norm_of_all_heads) {
      ops_.RmsNorm(x, stride, weight.as<float>(), eps, rows, heads * width, x, stride);
    } else if (rows < heads) {
      for (int64_t row = 0; row < rows; ++row) {
        ops_.RmsNorm(x + row * stride, width, weight.as<float>(), eps, heads, width, x + row * stride, width);
      }
    } else {
      for (int64_t head = 0; head < heads; ++head) {
        ops_.RmsNorm(x + head * width, stride, weight.as<float>(), eps, rows, width, x + head * width, stride);
      }
    }
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  std::vector<float> sinks_;              // [heads], or empty
  Buffer q_norm_, k_norm_;                // f32 [head_dim] or [heads * head_dim]; empty without q/k norms
  Buffer ones_;                           // f32 [head_dim]; empty without norms after rope
  std::unique_ptr<kernels::Linear> qkv_;  // hidden -> q (and gates) | k | v
  std::unique_ptr<kernels::Linear> out_;  // heads * head_dim -> hidden
  float* projected_ = nullptr;            // [rows][QkvWidth()]
  float* attended_ = nullptr;             // [rows][QWidth()]
  float* queries_ = nullptr;              // the same, with gates; else in projected_
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadGroupedAttention(const BlockSource& source, const std::string& prefix) {
  return std::make_unique<GroupedAttention>(source, prefix);
}

}  // namespace kvanta::models
