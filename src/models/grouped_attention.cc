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
      qkv_ = read_qkv({{module + "q_proj", QWidth()}, {module + "k_proj", KvWidth()}, {module + "v_proj", KvWidth()}});
    }
    out_ = source.reader.Linear({{module + "o_proj", config_.hidden}}, QWidth(), config_.o_bias, source.store);
  }

  std::vector<float> Sinks() const override { return sinks_; }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * QkvWidth());
    attended_ = scratch.Take(rows * QWidth());
  }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    const int64_t rows = step.rows;
    qkv_->Forward(x, rows, projected_, QkvWidth());
    float* q = projected_;
    float* k = q + QWidth();
    float* v = k + KvWidth();
    if (config_.qk_norm) {
      Norm(q_norm_, config_.heads, rows, q);
      Norm(k_norm_, config_.kv_heads, rows, k);
    }
    if (step.rope->rotary_dim != 0) {
      Rotate(step, config_.heads, step.query_rope_table, q);
      Rotate(step, config_.kv_heads, step.rope_table, k);
    }
    if (config_.layer_specs[step.layer].qk_l2_norm) {
      Norm(ones_, config_.heads, rows, q);
      Norm(ones_, config_.kv_heads, rows, k);
    }
    if (step.query_scales != nullptr) {
      ops_.ScaleRows(q, QkvWidth(), rows, QWidth(), step.query_scales, step.positions);
    }
    step.backend->Append(*step.plan, step.layer, k, v, QkvWidth());
    step.backend->Run(*step.plan, step.layer, q, QkvWidth(), attended_);
    out_->Forward(attended_, rows, out, config_.hidden);
  }

 private:
  int64_t QWidth() const { return int64_t{config_.heads} * config_.head_dim; }
  int64_t KvWidth() const { return int64_t{config_.kv_heads} * config_.head_dim; }
  int64_t QkvWidth() const { return QWidth() + 2 * KvWidth(); }

  static Buffer Ones(Device& device, int64_t size) {
    const std::vector<float> ones(static_cast<size_t>(size), 1.0F);
    Buffer buffer = device.Allocate(ones.size() * sizeof(float));
    device.CopyIn(buffer.data(), ones.data(), buffer.bytes());
    return buffer;
  }

  void Rotate(const AttentionStep& step, int heads, const float* table, float* x) noexcept {
    ops_.Rope(x, QkvWidth(), step.rows, heads, config_.head_dim, step.rope->rotary_dim, step.rope->interleaved, table,
              step.positions);
  }

  // Norms x [rows][heads * head_dim], row stride QkvWidth(), in place: every head, or all heads together. One call per
  // row or per head, whichever is fewer (the bits are the same).
  void Norm(const Buffer& weight, int heads, int64_t rows, float* x) noexcept {
    const auto eps = static_cast<float>(config_.rms_eps);
    const int64_t width = config_.head_dim, stride = QkvWidth();
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
  std::unique_ptr<kernels::Linear> qkv_;  // hidden -> (heads + 2 kv_heads) * head_dim: q | k | v
  std::unique_ptr<kernels::Linear> out_;  // heads * head_dim -> hidden
  float* projected_ = nullptr;            // [rows][QkvWidth()]
  float* attended_ = nullptr;             // [rows][QWidth()]
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadGroupedAttention(const BlockSource& source, const std::string& prefix) {
  return std::make_unique<GroupedAttention>(source, prefix);
}

}  // namespace kvanta::models
