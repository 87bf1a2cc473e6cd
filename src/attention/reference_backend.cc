#include "attention/reference_backend.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "attention/cache_writer.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/reference/attention.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
namespace reference = kernels::reference;

class ReferencePlan final : public Plan {
 public:
  Batch batch;
  std::vector<std::vector<int32_t>> chosen;  // [rows], by Select; empty: all
};

// Decoded keys or values of one KV head of a sequence, by the kind of record: f32 [tokens][width], empty without such
// records. K's unquantized channels follow the transformed ones.
struct DecodedSide {
  int64_t width = 0;
  std::vector<float> kinds[std::size(cache::kPageKinds)];

  const float* Row(PageKind kind, int64_t token) const { return kinds[cache::KindIndex(kind)].data() + token * width; }
};

// q = A^-T q
void MultiplyQuery(const formats::QueryTransform& transform, int head, std::vector<double>& q) {
  const float* matrix = transform.QueryMatrix(head);
  std::vector<double> product(q.size());
  for (size_t j = 0; j < q.size(); ++j) {
    for (size_t i = 0; i < q.size(); ++i) product[i] += q[j] * double{matrix[i]};
    matrix += formats::MatrixStride(transform.head_dim());
  }
  q = product;
}

class ReferenceBackend final : public Backend {
 public:
  ReferenceBackend(cache::PagePool& pool, BackendConfig config)
      : pool_(pool),
        config_(CheckConfig(std::move(config), pool.Layout(), {"reference", kernels::kMaxHeadDim})),
        spec_(SpecOf(pool, config_)),
        threads_(1),
        writer_(pool, config_) {}

  BackendInfo Info() const override {
    BackendInfo info{.name = "reference", .codes = {}};
    for (const formats::Format& format : formats::All()) info.codes.push_back(format.code);
    return info;
  }

  std::unique_ptr<Plan> MakePlan(const BatchShape& batch, std::unique_ptr<Plan> plan) override {
    auto& reference_plan = ReuseOrMake<ReferencePlan>(plan);
    MakeBatch(batch, pool_, spec_, reference_plan.batch);
    reference_plan.chosen.assign(static_cast<size_t>(reference_plan.batch.rows), {});
    return plan;
  }

  void Append(Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    writer_.Write(static_cast<ReferencePlan&>(plan).batch, layer, k, v, kv_stride, threads_);
  }

  void EncodeLevels(int group, const uint8_t* quantized, std::span<uint8_t* const> later) noexcept override {
    writer_.EncodeLevels(group, quantized, later, threads_);
  }

  void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
           const kernels::Linear* /*reader*/) noexcept override {
    const AttentionSpec& attention = config_.layers[static_cast<size_t>(layer)];
    const auto& reference_plan = static_cast<ReferencePlan&>(plan);
    for (const SequenceRows& sequence : reference_plan.batch.sequences) {
      for (int head = 0; head < attention.kv_heads; ++head) {
        RunHead(sequence, reference_plan.chosen, layer, head, q, q_stride, out);
      }
    }
  }

  void Select(Plan& plan, int layer, const float* q, int64_t q_stride, const float* weights) noexcept override {
    auto& reference_plan = static_cast<ReferencePlan&>(plan);
    for (const SequenceRows& sequence : reference_plan.batch.sequences) {
      const DecodedSide keys = Decode(sequence, layer, 0, true);
      for (int token = 0; token < sequence.span.tokens; ++token) {
        const int64_t row = sequence.first_row + token;
        const int heads = config_.layers[static_cast<size_t>(layer)].heads;
        SelectRow(keys, layer, sequence.span.start + token, q + row * q_stride, weights + row * heads,
                  reference_plan.chosen[static_cast<size_t>(row)]);
      }
    }
  }
  std::span<const int32_t> Selected(const Plan& plan, int64_t row) const noexcept override {
    return static_cast<const ReferencePlan&>(plan).chosen[static_cast<size_t>(row)];
  }

  cache::StateStep States(const Plan& plan, int layer) const noexcept override {
    return StatesOf(static_cast<const ReferencePlan&>(plan).batch, pool_, layer);
  }

  void AcceptDrafts(Plan& plan, std::span<const int> accepted) const noexcept override {
    attention::AcceptDrafts(accepted, static_cast<ReferencePlan&>(plan).batch);
  }

  AppendCounts Counts(int layer) const override { return writer_.Counts(layer); }
  const formats::LayerScales& Scales(int layer) const override { return config_.scales.at(static_cast<size_t>(layer)); }

 private:
  const formats::LayerScheme& Scheme(int layer) const { return pool_.Layout().layers[static_cast<size_t>(layer)]; }

  // Decodes a cell and the `unquantized` channels after it: rows f32 [tokens][head_dim + unquantized].
  static void DecodeRows(formats::SideKind kind, const formats::LayerScheme& scheme, const formats::Format& format,
                         formats::CellShape shape, const formats::CellSections& sections, const uint8_t* cell,
                         formats::HeadParameters parameters, int tokens, int unquantized, float* rows) {
    const int head_dim = shape.head_dim;
    std::vector<float> main(static_cast<size_t>(tokens * head_dim));
    std::vector<float> channels(static_cast<size_t>(tokens * unquantized));
    reference::DecodeCell(kind, format, shape, sections, cell, parameters, tokens, main.data());
    reference::DecodeCell(kind, *scheme.unquantized_format, scheme.UnquantizedShape(), scheme.UnquantizedSections(),
                          cell + sections.bytes, 1.0f, unquantized == 0 ? 0 : tokens, channels.data());
    for (int token = 0; token < tokens; ++token) {
      rows = std::copy_n(main.data() + token * head_dim, head_dim, rows);
      rows = std::copy_n(channels.data() + token * unquantized, unquantized, rows);
    }
  }

  // Returns a record in host memory; copies it first if the pool is in GPU memory.
  const uint8_t* Record(int group, PageKind kind, cache::PageId page, std::vector<uint8_t>& copy) const {
    const uint8_t* record = pool_.Record(group, kind, page);
    if (&pool_.device() == &Cpu()) return record;
    copy.resize(static_cast<size_t>(pool_.RecordBytes(group, kind)));
    pool_.device().CopyOut(copy.data(), record, copy.size());
    return copy.data();
  }

  DecodedSide Decode(const SequenceRows& sequence, int layer, int head, bool is_key) const {
    const formats::LayerScheme& scheme = Scheme(layer);
    const formats::SideKind kind = is_key || scheme.SharesCell() ? formats::SideKind::kK : formats::SideKind::kV;
    const int unquantized = is_key ? scheme.UnquantizedShape().head_dim : 0;
    const formats::Side& side = is_key ? scheme.k : scheme.v;
    const formats::LayerScales& scales = config_.scales[static_cast<size_t>(layer)];
    const formats::SideScales& of_side = is_key ? scales.k : scales.v;
    const formats::HeadParameters parameters{of_side.scale[static_cast<size_t>(head)],
                                             side.query ? of_side.query->Allocation(head) : nullptr};
    const int64_t page_size = scheme.shape.tokens;
    DecodedSide decoded;
    decoded.width = side.shape.head_dim + unquantized;
    const size_t size = static_cast<size_t>(sequence.End() * decoded.width);
    std::vector<uint8_t> copy;
    const auto rows = [&](PageKind page_kind, int64_t offset) {
      std::vector<float>& all = decoded.kinds[cache::KindIndex(page_kind)];
      all.resize(size);
      return all.data() + offset;
    };
    const int64_t first = config_.layers[static_cast<size_t>(layer)].visibility.First(sequence.span.start) / page_size;
    for (int64_t page = first; page * page_size < sequence.End(); ++page) {
      const cache::PageRef ref = sequence.span.pages[scheme.group][page];
      const int tokens = static_cast<int>(std::min(page_size, sequence.End() - page * page_size));
      const int64_t offset = page * page_size * decoded.width;
      const bool closed = tokens == page_size;
      if (ref.quantized != cache::kNoPage && (!scheme.exact_open || closed)) {
        const uint8_t* record = Record(scheme.group, PageKind::kQuantized, ref.quantized, copy);
        DecodeRows(kind, scheme, *side.format, side.shape, side.sections,
                   record + (is_key ? scheme.KCell(head) : scheme.VCell(head)), parameters, tokens, unquantized,
                   rows(PageKind::kQuantized, offset));
      }
      if (ref.exact != cache::kNoPage && scheme.exact_open) {
        const uint8_t* record = Record(scheme.group, PageKind::kExact, ref.exact, copy);
        DecodeRows(kind, scheme, ExactFormat(), side.shape, formats::Bf16Sections(side.shape),
                   record + (is_key ? scheme.ExactKCell(head) : scheme.ExactVCell(head)), 1.0f, tokens, unquantized,
                   rows(PageKind::kExact, offset));
      }
      for (size_t level = 0; level < scheme.ages.size(); ++level) {
        const PageKind page_kind = cache::kAgedKinds[level];
        if (ref.Of(page_kind) == cache::kNoPage) continue;
        const formats::AgeScheme& age = scheme.ages[level];
        const formats::Side& of_level = is_key || scheme.SharesCell() ? age.k : age.v;
        const formats::AgeCells cells = scheme.CellsOf(age, head);
        const uint8_t* record = Record(scheme.group, page_kind, ref.Of(page_kind), copy);
        DecodeRows(kind, scheme, *of_level.format, of_level.shape, of_level.sections,
                   record + (is_key ? cells.k : cells.v), 1.0f, tokens, unquantized, rows(page_kind, offset));
      }
    }
    return decoded;
  }

  void SelectRow(const DecodedSide& keys, int layer, int64_t position, const float* q, const float* weights,
                 std::vector<int32_t>& chosen) const {
    const AttentionSpec& attention = config_.layers[static_cast<size_t>(layer)];
    const formats::LayerScheme& scheme = Scheme(layer);
    if (position < attention.index_topk) return;
    std::vector<double> scores(static_cast<size_t>(position + 1));
    std::vector<double> query;
    for (int head = 0; head < attention.heads; ++head) {
      const float* row = q + int64_t{head} * attention.head_dim;
      query.assign(row, row + attention.head_dim);
      query.resize(static_cast<size_t>(scheme.k.shape.head_dim), 0.0);
      if (scheme.k.hadamard) reference::Hadamard(query);
      for (int64_t t = 0; t <= position; ++t) {
        const PageKind kind = PageRuleOf(scheme).Kind(position / scheme.shape.tokens, t / scheme.shape.tokens);
        const float* key = keys.Row(kind, t);
        double dot = 0;
        for (size_t c = 0; c < query.size(); ++c) dot += query[c] * double{key[c]};
        scores[static_cast<size_t>(t)] += double{weights[head]} * std::max(dot, 0.0);
      }
    }
    chosen.resize(scores.size());
    std::iota(chosen.begin(), chosen.end(), 0);
    std::stable_sort(chosen.begin(), chosen.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    chosen.resize(static_cast<size_t>(attention.index_topk));
    std::sort(chosen.begin(), chosen.end());
  }

  void RunHead(const SequenceRows& sequence, const std::vector<std::vector<int32_t>>& chosen_of_rows, int layer,
               int head, const float* q, int64_t q_stride, float* out) {
    const formats::LayerScheme& scheme = Scheme(layer);
    const AttentionSpec& attention = config_.layers[static_cast<size_t>(layer)];
    const int64_t head_dim = attention.head_dim;
    const int64_t page_size = scheme.shape.tokens;
    const int group = attention.heads / attention.kv_heads;
    const DecodedSide keys = Decode(sequence, layer, head, true);
    const DecodedSide values = Decode(sequence, layer, head, false);
    const std::vector<float>& mean = config_.scales[static_cast<size_t>(layer)].k.mean;
    std::vector<float> row_keys, row_values;
    // Unquantized channels multiply the query's original channels; the others multiply the transformed query, in which
    // outlier channels are zero.
    const auto key_dim = static_cast<size_t>(scheme.k.shape.head_dim);  // of cells, as values.width is
    std::vector<double> rest, row_q, row_out(static_cast<size_t>(values.width));
    const formats::RowTransform transform =
        formats::TransformOf(scheme.k, config_.scales[static_cast<size_t>(layer)].k, head, attention.head_dim);
    const cache::PageRule rule = PageRuleOf(scheme);
    for (int token = 0; token < sequence.span.tokens; ++token) {
      const int64_t position = sequence.span.start + token;
      const int64_t first = attention.visibility.First(position);
      row_keys.clear();
      row_values.clear();
      const std::vector<int32_t>& chosen = chosen_of_rows[static_cast<size_t>(sequence.first_row + token)];
      const bool is_sparse = attention.index_topk != 0 && !chosen.empty();
      for (int64_t t = first; t <= attention.visibility.Last(position, sequence.End()); ++t) {
        if (is_sparse && !std::ranges::binary_search(chosen, static_cast<int32_t>(t))) continue;
        const int64_t page = t / page_size;
        const PageKind kind =
            cache::ReadKind(rule, position / page_size, page, sequence.span.pages[scheme.group][page]);
        const float *key = keys.Row(kind, t), *value = values.Row(kind, t);
        row_keys.insert(row_keys.end(), key, key + keys.width);
        row_values.insert(row_values.end(), value, value + values.width);
      }
      for (int g = 0; g < group; ++g) {
        const int64_t query_head = int64_t{head} * group + g;
        const float* row = q + (sequence.first_row + token) * q_stride + query_head * attention.KeyDim();
        rest.assign(row, row + head_dim);
        reference::Logits logits{.scale = attention.softmax_scale, .softcap = attention.softcap};
        if (!attention.sinks.empty()) logits.sink = double{attention.sinks[static_cast<size_t>(query_head)]};
        if (scheme.k.mean) {
          for (int64_t c = 0; c < head_dim; ++c) {
            logits.bias += double{row[c]} * double{mean[static_cast<size_t>(head * head_dim + c)]};
          }
        }
        for (const int channel : transform.outliers) rest[static_cast<size_t>(channel)] = 0;
        if (scheme.k.query) MultiplyQuery(*config_.scales[static_cast<size_t>(layer)].k.query, head, rest);
        rest.resize(key_dim, 0.0);
        if (scheme.k.hadamard) reference::Hadamard(rest);
        row_q = rest;
        for (const int channel : transform.outliers) row_q.push_back(double{row[channel]});
        row_q.insert(row_q.end(), row + head_dim, row + attention.KeyDim());
        reference::Attend(row_q, row_keys.data(), row_values.data(), std::ssize(row_values) / values.width, logits,
                          row_out);
        if (scheme.v.hadamard) reference::Hadamard(row_out);
        float* result = out + (sequence.first_row + token) * attention.heads * head_dim + query_head * head_dim;
        std::transform(row_out.begin(), row_out.begin() + head_dim, result,
                       [](double x) { return static_cast<float>(x); });
      }
    }
  }

  cache::PagePool& pool_;
  const BackendConfig config_;
  const cache::KvCacheSpec spec_;
  ThreadPool threads_;
  CacheWriter writer_;
};

}  // namespace

std::unique_ptr<Backend> MakeReferenceBackend(cache::PagePool& pool, BackendConfig config) {
  return std::make_unique<ReferenceBackend>(pool, std::move(config));
}

}  // namespace kvanta::attention
