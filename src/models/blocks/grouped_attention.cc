// Grouped-query attention, with optional biases, norms of q, k and v, rope and sinks; with K and V of its own, or those
// of an earlier layer.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"

namespace kvanta::models {
namespace {

class GroupedAttention final : public AttentionBlock {
 public:
  GroupedAttention(const BlockSource& source, const LayerSpec& spec, const std::string& prefix)
      : ops_(source.ops),
        config_(source.config),
        spec_(spec),
        own_kv_heads_(source.ranks.OwnKvHeads(spec.kv_heads)),
        heads_(spec.heads / source.ranks.Size()),
        kv_heads_(spec.kv_layer >= 0 ? 0 : own_kv_heads_.count),
        v_head_dim_(source.config.v_head_dim == 0 ? spec.head_dim : source.config.v_head_dim),
        gathered_(source.ranks, int64_t{spec.heads} * v_head_dim_) {
    const std::string module = fmt::format("{}{}.", prefix, source.config.names.attention);
    if (spec.attention_sinks) sinks_ = ReadSinks(source, spec.heads, module);
    if (config_.qk_norm != QkNorm::kNone) {
      const bool all = config_.qk_norm == QkNorm::kAllHeads;
      const auto read_norm = [&](std::string_view name, int heads) {
        return Norm(source.reader, config_, fmt::format("{}{}", module, name),
                    all ? int64_t{heads} * spec_.head_dim : spec_.head_dim,
                    config_.qk_norm == QkNorm::kOwnWeights ? heads : 0);
      };
      q_norm_ = read_norm(config_.names.q_norm, heads_);
      if (HasKv()) k_norm_ = read_norm(config_.names.k_norm, kv_heads_);
    }
    if (spec.qk_l2_norm || config_.v_norm) ones_ = Filled(ops_.device(), spec_.head_dim, 1);
    if (PadsValues()) zeros_ = Filled(ops_.device(), spec_.head_dim - v_head_dim_, 0);
    const auto read_qkv = [&](std::span<const StackedWeight> stack) {
      return source.reader.Linear(stack, config_.hidden, config_.qkv_bias, {source.store, kInt16Activations});
    };
    const int64_t ranks = source.ranks.Size();
    const bool own_gates = config_.attn_output_gate == OutputGate::kOwnMatrix;
    const int64_t queries = ranks * (own_gates ? QWidth() : QueryProjection());
    const StackedWeight q{module + "q_proj", queries}, k = RowsOfKvHeads(module + "k_proj", spec_.head_dim),
                                                       v = RowsOfKvHeads(module + "v_proj", v_head_dim_);
    const bool is_fused = config_.qkv_layout != QkvLayout::kSeparate && !source.reader.HasPrefix(module + "q_proj.");
    if (!HasKv()) {
      for (const char* unused : {"k_proj.", "v_proj.", "k_norm."}) source.reader.SkipTensors(module + unused);
      qkv_ = read_qkv(std::array{q});
    } else if (spec.k_eq_v) {
      qkv_ = read_qkv(std::array{q, k});
    } else if (own_gates) {
      qkv_ = read_qkv(std::array{q, StackedWeight{module + std::string(config_.names.output_gate), queries}, k, v});
    } else if (!is_fused) {
      qkv_ = read_qkv(std::array{q, k, v});
    } else {
      const std::string fused = module + std::string(config_.names.qkv);
      qkv_ = read_qkv(config_.qkv_layout == QkvLayout::kByKvHead ? RowsByKvHead(source.ranks, fused)
                                                                 : ConcatenatedRows(source.ranks, fused));
    }
    if (config_.attn_output_gate == OutputGate::kPerHead) {
      head_gates_ = source.reader.Linear({{module + std::string(config_.names.output_gate), ranks * heads_}},
                                         config_.hidden, false, source.store);
    }
    out_.emplace(source.ranks,
                 source.reader.Linear({{module + std::string(config_.names.attention_out), config_.hidden}},
                                      ranks * heads_ * v_head_dim_, config_.o_bias, source.store),
                 config_.hidden);
  }

  std::vector<float> Sinks() const override { return sinks_; }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * QkvWidth());
    attended_ = scratch.Take(rows * QWidth());
    if (PadsValues()) values_ = scratch.Take(rows * heads_ * v_head_dim_);
    if (SplitsQueries()) queries_ = scratch.Take(rows * QWidth());
    if (head_gates_) gates_ = scratch.Take(rows * heads_);
    gathered_.Place(scratch, rows);
    out_->Place(scratch, rows);
  }

  const kernels::Linear* Reader() const noexcept override { return qkv_.get(); }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    const int64_t rows = step.rows;
    qkv_->Forward(x, rows, projected_, QkvWidth());
    const bool split = SplitsQueries();
    float* k = projected_ + QueryProjection();
    float* v = k + KvWidth();
    if (split) CopyHeads(rows, projected_, queries_);
    float* q = split ? queries_ : projected_;
    if (spec_.k_eq_v) ops_.Copy(k, QkvWidth(), rows, KvWidth(), v, QkvWidth());
    if (config_.v_norm && HasKv()) L2NormHeads(kv_heads_, rows, v, QkvWidth());
    const int64_t q_stride = split ? QWidth() : QkvWidth();
    if (config_.value_scale != 1 && HasKv()) ops_.ScaleColumns(v, QkvWidth(), rows, ValueWidth(), config_.value_scale);
    if (PadsValues()) v = PadValues(rows, v);
    attention::HeadRows heads{.q = q, .q_stride = q_stride, .k = k, .v = v, .kv_stride = QkvWidth(), .rows = rows};
    if (SetTransforms(step, heads)) {
      step.backend->AppendHeads(*step.plan, step.layer, heads);
    } else {
      TransformHeads(step, rows, q, q_stride, k);
      if (HasKv()) step.backend->Append(*step.plan, step.layer, k, v, QkvWidth());
    }
    // Else gates, or other ranks' columns, come between.
    const bool is_whole = !Gated() && !head_gates_ && QWidth() == gathered_.Columns();
    step.backend->Run(*step.plan, HasKv() ? step.layer : spec_.kv_layer, q, q_stride, attended_,
                      is_whole ? out_->Reader() : nullptr);
    if (split) {
      GateHeads(rows);
    } else if (Gated()) {
      ops_.MulGate(config_.attn_gate_function, attended_, QWidth(), projected_ + QWidth(), QkvWidth(), rows, QWidth(),
                   1);
    } else if (head_gates_) {
      head_gates_->Forward(x, rows, gates_, heads_);
      ops_.MulGate(config_.attn_gate_function, attended_, QWidth(), gates_, heads_, rows, QWidth(), spec_.head_dim);
    }
    if (PadsValues()) CutValues(rows);
    out_->Forward(gathered_.Gather(PadsValues() ? values_ : attended_, rows), rows, out);
  }

 private:
  bool HasKv() const { return spec_.kv_layer < 0; }
  bool PadsValues() const { return v_head_dim_ != spec_.head_dim; }
  // Gates of channels, which are projected with the queries.
  bool Gated() const { return SplitsQueries() || config_.attn_output_gate == OutputGate::kOwnMatrix; }
  bool SplitsQueries() const { return config_.attn_output_gate == OutputGate::kAfterQueries; }
  int64_t QWidth() const { return int64_t{heads_} * spec_.head_dim; }
  int64_t KvWidth() const { return int64_t{kv_heads_} * spec_.head_dim; }
  // Queries, and gates if there are any: after each head's q, or after all.
  int64_t QueryProjection() const { return QWidth() * (Gated() ? 2 : 1); }
  int64_t ValueWidth() const { return int64_t{kv_heads_} * v_head_dim_; }
  // Values that are padded follow those that are not.
  int64_t QkvWidth() const { return QueryProjection() + KvWidth() + ValueWidth() + (PadsValues() ? KvWidth() : 0); }

  // This rank's heads' sinks.
  static std::vector<float> ReadSinks(const BlockSource& source, int all, const std::string& module) {
    const std::vector<float> sinks = source.reader.KeptValues(module + std::string(source.config.names.sinks), all);
    const parallel::Partition heads = source.ranks.PartitionOf(all);
    return {sinks.begin() + heads.Begin(source.ranks.Rank()), sinks.begin() + heads.Begin(source.ranks.Rank() + 1)};
  }

  // The rows of this rank's KV heads, of `width` rows each, in a matrix of all heads.
  StackedWeight RowsOfKvHeads(const std::string& module, int64_t width) const {
    return {.module = module,
            .out = kv_heads_ * width,
            .tensor_out = spec_.kv_heads * width,
            .tensor_first = own_kv_heads_.first * width,
            .whole = true};
  }

  // The parts of a matrix q | k | v.
  std::vector<StackedWeight> ConcatenatedRows(const parallel::Communicator& ranks, const std::string& module) const {
    const int64_t queries = ranks.Size() * QWidth(), keys = int64_t{spec_.kv_heads} * spec_.head_dim;
    const int64_t all = queries + 2 * keys;
    if (ranks.IsSingleRank()) return {{module, all}};
    StackedWeight k = RowsOfKvHeads(module, spec_.head_dim);
    k.tensor_out = all;
    k.tensor_first += queries;
    StackedWeight v = k;
    v.tensor_first += keys;
    return {{.module = module, .out = queries, .tensor_out = all}, k, v};
  }

  // The parts of a matrix with q | k | v of each KV head: q of all heads of this rank, then k, then v.
  std::vector<StackedWeight> RowsByKvHead(const parallel::Communicator& ranks, const std::string& module) const {
    const int64_t head = spec_.head_dim, first_head = own_kv_heads_.first;
    const int64_t of_group = spec_.heads / spec_.kv_heads * head, stride = of_group + 2 * head;
    // Ranks with the same KV head have different ones of its queries.
    const int64_t queries = heads_ / kv_heads_ * head, first_query = ranks.Rank() * QWidth() - first_head * of_group;
    std::vector<StackedWeight> rows;
    const auto add = [&](int64_t first, int64_t count) {
      for (int64_t kv_head = first_head; kv_head < first_head + kv_heads_; ++kv_head) {
        rows.push_back({.module = module,
                        .out = count,
                        .tensor_out = spec_.kv_heads * stride,
                        .tensor_first = kv_head * stride + first,
                        .whole = true});
      }
    };
    add(first_query, queries);
    add(of_group, head);
    add(of_group + head, head);
    return rows;
  }

  // Each head's values with zeros after them, after the values `v`.
  float* PadValues(int64_t rows, const float* v) noexcept {
    float* padded = projected_ + QkvWidth() - KvWidth();
    for (int head = 0; head < kv_heads_; ++head) {
      float* to = padded + int64_t{head} * spec_.head_dim;
      ops_.Copy(v + int64_t{head} * v_head_dim_, QkvWidth(), rows, v_head_dim_, to, QkvWidth());
      ops_.Copy(zeros_.as<float>(), 0, rows, spec_.head_dim - v_head_dim_, to + v_head_dim_, QkvWidth());
    }
    return padded;
  }

  // The outputs of attention without those of the zeros.
  void CutValues(int64_t rows) noexcept {
    ops_.Copy(attended_, spec_.head_dim, rows * heads_, v_head_dim_, values_, v_head_dim_);
  }

  // Norms and RoPE of queries and keys as a part of appending; false if this layer's, or the backend, are others.
  bool SetTransforms(const AttentionStep& step, attention::HeadRows& heads) const noexcept {
    const bool has_norms = config_.qk_norm == QkNorm::kPerHead || config_.qk_norm == QkNorm::kOwnWeights;
    if (!has_norms && config_.qk_norm != QkNorm::kNone) return false;
    if (!HasKv() || spec_.qk_l2_norm || step.query_scales != nullptr) return false;
    if (!step.backend->TransformsHeads(step.layer)) return false;
    if (has_norms && !(q_norm_.SetTransform(heads.q_transform) && k_norm_.SetTransform(heads.k_transform)))
      return false;
    const auto set_rope = [&](kernels::HeadTransform& transform, const float* table) {
      transform.cos_sin = table;
      transform.rotary_dim = step.rope->rotary_dim;
      transform.interleaved = step.rope->interleaved;
      transform.positions = step.positions;
    };
    if (step.rope->rotary_dim != 0) {
      set_rope(heads.q_transform, step.query_rope_table);
      set_rope(heads.k_transform, step.rope_table);
    } else if (!has_norms) {
      heads.q = nullptr;
    }
    return true;
  }

  // The same, and all others, by operations of their own.
  void TransformHeads(const AttentionStep& step, int64_t rows, float* q, int64_t q_stride, float* k) noexcept {
    const auto norm = [&] {
      NormHeads(q_norm_, heads_, rows, q, q_stride);
      if (HasKv()) NormHeads(k_norm_, kv_heads_, rows, k, QkvWidth());
    };
    if (config_.qk_norm != QkNorm::kNone && config_.qk_norm != QkNorm::kPerHeadAfterRope) norm();
    if (step.rope->rotary_dim != 0) {
      // Keys that follow the queries are further heads.
      const bool together = HasKv() && k == q + QWidth() && step.query_rope_table == step.rope_table;
      Rotate(step, heads_ + (together ? kv_heads_ : 0), step.query_rope_table, q, q_stride);
      if (HasKv() && !together) Rotate(step, kv_heads_, step.rope_table, k, QkvWidth());
    }
    if (config_.qk_norm == QkNorm::kPerHeadAfterRope) norm();
    if (spec_.qk_l2_norm) {
      L2NormHeads(heads_, rows, q, q_stride);
      L2NormHeads(kv_heads_, rows, k, QkvWidth());
    }
    if (step.query_scales != nullptr) {
      ops_.ScaleRows(q, q_stride, rows, QWidth(), step.query_scales, step.positions);
    }
  }

  void Rotate(const AttentionStep& step, int heads, const float* table, float* x, int64_t stride) noexcept {
    ops_.Rope(x, stride, step.rows, heads, spec_.head_dim, step.rope->rotary_dim,
              {.interleaved = step.rope->interleaved}, table, step.positions);
  }

  // Calls visit(first row, rows, head, heads) for all rows of each head or all heads of each row, whichever are fewer.
  template <class Visit>
  void ForHeads(int64_t rows, Visit visit) const noexcept {
    if (rows < heads_) {
      for (int64_t row = 0; row < rows; ++row) visit(row, 1, 0, heads_);
    } else {
      for (int head = 0; head < heads_; ++head) visit(0, rows, head, 1);
    }
  }

  // The q of each head, without the gates between them.
  void CopyHeads(int64_t rows, const float* from, float* to) noexcept {
    const int64_t width = spec_.head_dim;
    ForHeads(rows, [&](int64_t row, int64_t count, int64_t head, int64_t heads) {
      const bool one_row = heads > 1;
      ops_.Copy(from + row * QkvWidth() + head * 2 * width, one_row ? 2 * width : QkvWidth(), one_row ? heads : count,
                width, to + row * QWidth() + head * width, one_row ? width : QWidth());
    });
  }

  void GateHeads(int64_t rows) noexcept {
    const int64_t width = spec_.head_dim;
    ForHeads(rows, [&](int64_t row, int64_t count, int64_t head, int64_t heads) {
      const bool one_row = heads > 1;
      ops_.MulGate(config_.attn_gate_function, attended_ + row * QWidth() + head * width, one_row ? width : QWidth(),
                   projected_ + row * QkvWidth() + (2 * head + 1) * width, one_row ? 2 * width : QkvWidth(),
                   one_row ? heads : count, width, 1);
    });
  }

  // Norms x [rows][heads * head_dim] in place: every head, or all heads together. One call per row or per head,
  // whichever is fewer (the bits are the same).
  void NormHeads(const Norm& norm, int heads, int64_t rows, float* x, int64_t stride) noexcept {
    if (config_.qk_norm == QkNorm::kAllHeads) return norm.Forward(ops_, x, stride, rows, x, stride);
    VisitHeads(heads, rows, x, stride, norm.HasWeightsByHead(),
               [&](float* part, int64_t step, int64_t count, int head) {
                 norm.Forward(ops_, part, step, count, part, step, head);
               });
  }

  void L2NormHeads(int heads, int64_t rows, float* x, int64_t stride) noexcept {
    const auto eps = static_cast<float>(config_.rms_eps);
    VisitHeads(heads, rows, x, stride, false, [&](float* part, int64_t step, int64_t count, int /*head*/) {
      ops_.RmsNorm(part, step, ones_.as<float>(), eps, count, spec_.head_dim, part, step);
    });
  }

  // Calls visit(x, stride, rows, head) for the heads of each row, or for the rows of each head, whichever are fewer
  // calls.
  template <class Visit>
  void VisitHeads(int heads, int64_t rows, float* x, int64_t stride, bool by_head, Visit visit) noexcept {
    const int64_t width = spec_.head_dim;
    if (rows < heads && !by_head) {
      for (int64_t row = 0; row < rows; ++row) visit(x + row * stride, width, heads, 0);
    } else {
      for (int head = 0; head < heads; ++head) visit(x + head * width, stride, rows, head);
    }
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const LayerSpec spec_;
  parallel::KvHeads own_kv_heads_;               // this rank's
  int heads_, kv_heads_;                         // of this rank; no KV heads where those of another layer are used
  int v_head_dim_;                               // channels of a head's value
  std::vector<float> sinks_;                     // [heads], or empty
  Norm q_norm_, k_norm_;                         // none without q/k norms
  Buffer ones_;                                  // f32 [head_dim]; empty without norms after rope
  Buffer zeros_;                                 // f32 [head_dim - v_head_dim_]; empty without padded values
  std::unique_ptr<kernels::Linear> qkv_;         // hidden -> q (and gates) | k | v, which may be padded after it
  std::unique_ptr<kernels::Linear> head_gates_;  // hidden -> heads; null: none
  GatheredColumns gathered_;                     // all ranks' heads * head_dim
  std::optional<ColumnParallelLinear> out_;      // all ranks' heads * head_dim -> hidden
  float* projected_ = nullptr;                   // [rows][QkvWidth()]
  float* attended_ = nullptr;                    // [rows][QWidth()]
  float* values_ = nullptr;                      // [rows][heads * v_head_dim_], of padded values
  float* gates_ = nullptr;                       // [rows][heads], of head_gates_
  float* queries_ = nullptr;                     // the same, with gates after each head's q; else in projected_
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadGroupedAttention(const BlockSource& source, const LayerSpec& spec,
                                                     const std::string& prefix) {
  return std::make_unique<GroupedAttention>(source, spec, prefix);
}

}  // namespace kvanta::models
