#include "observe/query_moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/math.h"
#include "kernels/attention/cpu/table.h"
#include "kvanta/error.h"
#include "observe/rope_average.h"

namespace kvanta::observe {
namespace {

using kernels::kMaxHeadDim;

// Positions from one weighted query to the next: the cost of a query is that of its row of attention.
constexpr int64_t kSampledQueries = 8;

// Adds x x^T of four rows to the upper triangle of `moment` [n][n], one row after the other.
void AddOuterProducts(const double (&x)[4][kMaxHeadDim], int n, double* moment) noexcept {
  for (int i = 0; i < n; ++i) {
    double* __restrict to = moment + int64_t{i} * n;
    for (int j = i; j < n; ++j) {
      to[j] = (((to[j] + x[0][i] * x[0][j]) + x[1][i] * x[1][j]) + x[2][i] * x[2][j]) + x[3][i] * x[3][j];
    }
  }
}

// Cost of an error in the logits of one query: the softmax's derivative times the values, squared, summed over the
// tokens [first, last) of quantized pages. Errors of different tokens are independent, so their squares add up.
class LogitErrorCost {
 public:
  explicit LogitErrorCost(const attention::AttentionSpec& spec) : spec_(spec) {}

  // Keys and values f32, `stride` floats apart, of all positions up to the query's.
  double Of(const float* query, int head, int64_t position, const float* keys, const float* values, int64_t stride,
            int64_t first, int64_t last) {
    const int n = spec_.head_dim;
    const int64_t begin = spec_.visibility.First(position);
    first = std::max(first, begin);
    if (first >= last) return 0;
    probabilities_.resize(static_cast<size_t>(position + 1 - begin));
    float max = spec_.sinks.empty() ? -std::numeric_limits<float>::infinity() : spec_.sinks[static_cast<size_t>(head)];
    const float sink = max;
    for (int64_t t = begin; t <= position; ++t) {
      float logit = Dot(query, keys + t * stride, n) * spec_.softmax_scale;
      if (spec_.softcap > 0) logit = spec_.softcap * std::tanh(logit / spec_.softcap);
      probabilities_[static_cast<size_t>(t - begin)] = logit;
      max = std::max(max, logit);
    }
    float sum = spec_.sinks.empty() ? 0.0F : std::exp(sink - max);
    for (float& p : probabilities_) sum += p = std::exp(p - max);
    float output[kMaxHeadDim] = {}, square_output[kMaxHeadDim] = {};  // sums of p v and of p^2 v
    double squares = 0, lengths = 0;                                  // sums of p^2 and of p^2 |v|^2
    for (int64_t t = begin; t <= position; ++t) {
      const float p = probabilities_[static_cast<size_t>(t - begin)] / sum;
      const float* value = values + t * stride;
      for (int c = 0; c < n; ++c) output[c] += p * value[c];
      if (t < first || t >= last) continue;
      const float square = p * p;
      for (int c = 0; c < n; ++c) square_output[c] += square * value[c];
      squares += double{square};
      lengths += double{square} * double{Dot(value, value, n)};
    }
    const double cost = lengths - 2 * double{Dot(output, square_output, n)} + squares * double{Dot(output, output, n)};
    return std::max(0.0, cost);
  }

 private:
  static float Dot(const float* a, const float* b, int n) noexcept {
    float parts[8] = {};
    for (int i = 0; i < n; i += 8) {
      for (int j = 0; j < 8; ++j) parts[j] += a[i + j] * b[i + j];
    }
    return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
  }

  const attention::AttentionSpec& spec_;
  std::vector<float> probabilities_;
};

class MomentCollector final : public KvObserver {
 public:
  // ropes: of each layer; null: rows count as they are.
  MomentCollector(QueryMoments& out, const std::vector<attention::AttentionSpec>& attention,
                  const std::vector<const RopeAverage*>& ropes, int64_t skip, ThreadPool& threads)
      : out_(out),
        attention_(attention),
        ropes_(ropes),
        skip_(skip),
        threads_(threads),
        keys_(static_cast<size_t>(out.layers)),
        values_(static_cast<size_t>(out.layers)),
        seen_keys_(static_cast<size_t>(out.layers)),
        seen_queries_(static_cast<size_t>(out.layers)),
        finite_(static_cast<size_t>(out.layers) * static_cast<size_t>(out.kv_heads), 1) {}

  void OnAppend(int layer, const float* k, const float* v, int64_t stride, int64_t rows) noexcept override {
    const int64_t start = seen_keys_[static_cast<size_t>(layer)];
    const int64_t first = First(seen_keys_, layer, rows);
    const RopeAverage* rope = ropes_[static_cast<size_t>(layer)];
    std::vector<float>& keys = keys_[static_cast<size_t>(layer)];
    std::vector<float>& values = values_[static_cast<size_t>(layer)];
    for (int64_t row = 0; IsWeighted() && row < rows; ++row) {
      keys.insert(keys.end(), k + row * stride, k + row * stride + KvChannels());
      values.insert(values.end(), v + row * stride, v + row * stride + KvChannels());
    }
    auto add_head = [&](int64_t head, int) {
      const int64_t at = int64_t{layer} * out_.kv_heads + head;
      float* amax = out_.amax.data() + (int64_t{layer} * 2) * out_.kv_heads + head;
      amax[0] = Largest(amax[0], at, k + head * out_.head_dim, stride, rows);
      amax[out_.kv_heads] = Largest(amax[out_.kv_heads], at, v + head * out_.head_dim, stride, rows);
      AddRows(at, rope, start + first, k + first * stride + head * out_.head_dim, stride, rows - first, 1,
              out_.key_sum.data() + at * out_.head_dim, out_.key_moment.data() + at * out_.head_dim * out_.head_dim);
    };
    threads_.ForEach(out_.kv_heads, add_head);
  }

  bool ObservesQueries() const noexcept override { return true; }

  void OnRun(int layer, const float* q, int64_t stride, int64_t rows) noexcept override {
    const int64_t start = seen_queries_[static_cast<size_t>(layer)];
    const int64_t first = First(seen_queries_, layer, rows);
    const RopeAverage* rope = ropes_[static_cast<size_t>(layer)];
    const int group = attention_[static_cast<size_t>(layer)].heads / out_.kv_heads;
    auto add_head = [&](int64_t head, int) {
      const int64_t at = int64_t{layer} * out_.kv_heads + head;
      AddRows(at, rope, start + first, q + first * stride + head * group * out_.head_dim, stride, rows - first, group,
              nullptr, out_.query_moment.data() + at * out_.head_dim * out_.head_dim);
      if (IsWeighted()) AddWeighted(layer, static_cast<int>(head), group, q, stride, start, rows);
    };
    threads_.ForEach(out_.kv_heads, add_head);
  }

  // The first layer with a value that is not finite, or -1.
  int BadLayer() const noexcept {
    const auto bad = std::ranges::find(finite_, 0);
    return bad == finite_.end() ? -1 : static_cast<int>((bad - finite_.begin()) / out_.kv_heads);
  }

 private:
  // The first of `rows` new rows that counts.
  int64_t First(std::vector<int64_t>& seen, int layer, int64_t rows) const noexcept {
    int64_t& start = seen[static_cast<size_t>(layer)];
    const int64_t first = std::clamp<int64_t>(skip_ - start, 0, rows);
    start += rows;
    return first;
  }

  // The larger of `so_far` and the magnitudes of a head's rows.
  float Largest(float so_far, int64_t at, const float* rows, int64_t stride, int64_t count) noexcept {
    for (int64_t row = 0; row < count; ++row) {
      for (int c = 0; c < out_.head_dim; ++c) {
        const float magnitude = std::abs(rows[row * stride + c]);
        if (!std::isfinite(magnitude)) finite_[static_cast<size_t>(at)] = 0;
        so_far = std::max(so_far, magnitude);
      }
    }
    return so_far;
  }

  // `heads` adjacent heads of `tokens` tokens from `position` on, in the order of tokens.
  void AddRows(int64_t at, const RopeAverage* rope, int64_t position, const float* rows, int64_t stride, int64_t tokens,
               int heads, double* sum, double* moment) noexcept {
    const int n = out_.head_dim;
    const int64_t count = tokens * heads;
    alignas(64) double x[4][kMaxHeadDim];
    for (int64_t first = 0; first < count; first += 4) {
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t row = first + i;
        const float* from = rows + row / heads * stride + row % heads * n;
        for (int c = 0; c < n; ++c) {
          const float value = row < count ? from[c] : 0.0F;
          if (!std::isfinite(value)) finite_[static_cast<size_t>(at)] = 0;
          x[i][c] = value;
        }
        if (row >= count) continue;
        if (rope != nullptr) rope->Undo(position + row / heads, x[i]);
        for (int c = 0; sum != nullptr && c < n; ++c) sum[c] += x[i][c];
      }
      AddOuterProducts(x, n, moment);
    }
  }

  bool IsWeighted() const noexcept { return !out_.weighted_query_moment.empty(); }
  int64_t KvChannels() const noexcept { return int64_t{out_.kv_heads} * out_.head_dim; }

  // Queries of a KV head at every kSampledQueries-th position, times the root of their cost.
  void AddWeighted(int layer, int kv_head, int group, const float* q, int64_t stride, int64_t start,
                   int64_t rows) noexcept {
    const int n = out_.head_dim;
    const attention::AttentionSpec& spec = attention_[static_cast<size_t>(layer)];
    const RopeAverage* rope = ropes_[static_cast<size_t>(layer)];
    LogitErrorCost cost(spec);
    const int64_t channel = int64_t{kv_head} * n;
    const float* keys = keys_[static_cast<size_t>(layer)].data() + channel;
    const float* values = values_[static_cast<size_t>(layer)].data() + channel;
    double* moment = out_.weighted_query_moment.data() + (int64_t{layer} * out_.kv_heads + kv_head) * n * n;
    alignas(64) double x[4][kMaxHeadDim] = {};
    int filled = 0;
    const int64_t begin = std::max(start, 2 * skip_);  // the first query with a quantized page
    for (int64_t position = RoundUp(begin, kSampledQueries); position < start + rows; position += kSampledQueries) {
      for (int i = 0; i < group; ++i) {
        const int head = kv_head * group + i;
        const float* query = q + (position - start) * stride + int64_t{head} * n;
        const double root =
            std::sqrt(cost.Of(query, head, position, keys, values, KvChannels(), skip_, position / skip_ * skip_));
        for (int c = 0; c < n; ++c) x[filled][c] = root * double{query[c]};
        if (rope != nullptr) rope->Undo(position, x[filled]);
        if (++filled < 4) continue;
        AddOuterProducts(x, n, moment);
        filled = 0;
      }
    }
    for (int i = filled; i < 4; ++i) std::fill_n(x[i], n, 0.0);
    if (filled != 0) AddOuterProducts(x, n, moment);
  }

  QueryMoments& out_;
  const std::vector<attention::AttentionSpec>& attention_;
  const std::vector<const RopeAverage*>& ropes_;
  const int64_t skip_;
  ThreadPool& threads_;
  std::vector<std::vector<float>> keys_, values_;  // [layers]: [tokens so far][kv_heads * head_dim], if weighted
  std::vector<int64_t> seen_keys_, seen_queries_;  // tokens of each layer so far
  std::vector<char> finite_;                       // [layers][kv_heads]
};

// Copies the upper triangles to the lower ones.
void Mirror(std::vector<double>& moments, int64_t n) {
  for (size_t first = 0; first < moments.size(); first += static_cast<size_t>(n * n)) {
    double* moment = moments.data() + first;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) moment[i * n + j] = moment[j * n + i];
    }
  }
}

// Averages over positions: one for each different rope of the layers.
class LayerRopes {
 public:
  LayerRopes(const models::ModelConfig& config, std::span<const int64_t> context_lengths, int64_t positions,
             int64_t tokens)
      : of_layers_(static_cast<size_t>(config.KvLayers())) {
    std::vector<const models::RopeSpec*> specs;
    for (size_t layer = 0; !context_lengths.empty() && layer < of_layers_.size(); ++layer) {
      const models::RopeSpec& rope = config.layer_specs[layer].rope;
      const auto found = std::ranges::find_if(specs, [&](const models::RopeSpec* spec) { return *spec == rope; });
      const auto index = static_cast<size_t>(found - specs.begin());
      if (found == specs.end()) {
        specs.push_back(&rope);
        different_.push_back(std::make_unique<RopeAverage>(rope, config.head_dim, context_lengths, positions, tokens));
      }
      of_layers_[layer] = different_[index].get();
    }
  }

  const std::vector<const RopeAverage*>& OfLayers() const noexcept { return of_layers_; }

  // Replaces sums of rows before RoPE by their averages.
  void Average(QueryMoments& moments) const {
    const size_t n = static_cast<size_t>(moments.head_dim), heads = static_cast<size_t>(moments.kv_heads);
    for (size_t at = 0; at < of_layers_.size() * heads; ++at) {
      const RopeAverage* rope = of_layers_[at / heads];
      if (rope == nullptr) continue;
      rope->AverageSum(moments.key_sum.data() + at * n);
      for (auto* moment : {&moments.key_moment, &moments.query_moment, &moments.weighted_query_moment}) {
        if (!moment->empty()) rope->AverageMoment(moment->data() + at * n * n);
      }
    }
  }

 private:
  std::vector<std::unique_ptr<RopeAverage>> different_;
  std::vector<const RopeAverage*> of_layers_;
};

}  // namespace

QueryMoments CollectQueryMoments(models::Model& model, const BackendFactory& make_backend,
                                 const formats::CacheLayout& layout, std::span<const int32_t> tokens, int64_t max_rows,
                                 bool weighted, std::span<const int64_t> context_lengths, int64_t positions,
                                 ThreadPool& threads) {
  const models::ModelConfig& config = model.Config();
  if (config.UsesMla()) {
    throw InputError(fmt::format("{} stores latents (MLA), which have no +query", config.architecture));
  }
  QueryMoments result;
  CheckEqualHeads(config);
  result.layers = config.KvLayers();
  result.kv_heads = config.kv_heads;
  result.head_dim = config.head_dim;
  const int64_t skip = layout.page_size;
  result.tokens = std::max<int64_t>(0, std::ssize(tokens) - skip);
  const size_t channels =
      static_cast<size_t>(result.layers) * static_cast<size_t>(config.kv_heads) * static_cast<size_t>(config.head_dim);
  result.amax.assign(2 * static_cast<size_t>(result.layers) * static_cast<size_t>(config.kv_heads), 0.0F);
  result.key_sum.assign(channels, 0.0);
  result.key_moment.assign(channels * static_cast<size_t>(config.head_dim), 0.0);
  result.query_moment = result.key_moment;
  if (weighted) result.weighted_query_moment = result.key_moment;
  const std::vector<attention::AttentionSpec> attention = model.AttentionLayers();
  const LayerRopes ropes(config, context_lengths, positions, std::ssize(tokens));
  MomentCollector collector(result, attention, ropes.OfLayers(), skip, threads);
  ForwardObserved(model, make_backend, layout, tokens, max_rows, collector);
  if (collector.BadLayer() >= 0) {
    throw InputError(fmt::format("cannot calibrate: layer {} has keys, values or queries that are not finite",
                                 collector.BadLayer()));
  }
  for (auto* moments : {&result.key_moment, &result.query_moment, &result.weighted_query_moment}) {
    Mirror(*moments, config.head_dim);
  }
  ropes.Average(result);
  return result;
}

}  // namespace kvanta::observe
