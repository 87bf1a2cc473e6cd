#include "observe/query_moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/attention/cpu/table.h"
#include "kvanta/error.h"

namespace kvanta::observe {
namespace {

using kernels::kMaxHeadDim;

// Adds x x^T of four rows to the upper triangle of `moment` [n][n], one row after the other.
void AddOuterProducts(const double (&x)[4][kMaxHeadDim], int n, double* moment) noexcept {
  for (int i = 0; i < n; ++i) {
    double* __restrict to = moment + int64_t{i} * n;
    for (int j = i; j < n; ++j) {
      to[j] = (((to[j] + x[0][i] * x[0][j]) + x[1][i] * x[1][j]) + x[2][i] * x[2][j]) + x[3][i] * x[3][j];
    }
  }
}

class MomentCollector final : public KvObserver {
 public:
  MomentCollector(QueryMoments& out, const std::vector<attention::AttentionSpec>& attention, int64_t skip,
                  ThreadPool& threads)
      : out_(out),
        attention_(attention),
        skip_(skip),
        threads_(threads),
        seen_keys_(static_cast<size_t>(out.layers)),
        seen_queries_(static_cast<size_t>(out.layers)),
        finite_(static_cast<size_t>(out.layers) * static_cast<size_t>(out.kv_heads), 1) {}

  void OnAppend(int layer, const float* k, const float* v, int64_t stride, int64_t rows) noexcept override {
    const int64_t first = First(seen_keys_, layer, rows);
    auto add_head = [&](int64_t head, int) {
      const int64_t at = int64_t{layer} * out_.kv_heads + head;
      float* amax = out_.amax.data() + (int64_t{layer} * 2) * out_.kv_heads + head;
      amax[0] = Largest(amax[0], at, k + head * out_.head_dim, stride, rows);
      amax[out_.kv_heads] = Largest(amax[out_.kv_heads], at, v + head * out_.head_dim, stride, rows);
      AddRows(at, k + first * stride + head * out_.head_dim, stride, rows - first, 1,
              out_.key_sum.data() + at * out_.head_dim, out_.key_moment.data() + at * out_.head_dim * out_.head_dim);
    };
    threads_.ForEach(out_.kv_heads, add_head);
  }

  bool ObservesQueries() const noexcept override { return true; }

  void OnRun(int layer, const float* q, int64_t stride, int64_t rows) noexcept override {
    const int64_t first = First(seen_queries_, layer, rows);
    const int group = attention_[static_cast<size_t>(layer)].heads / out_.kv_heads;
    auto add_head = [&](int64_t head, int) {
      const int64_t at = int64_t{layer} * out_.kv_heads + head;
      AddRows(at, q + first * stride + head * group * out_.head_dim, stride, rows - first, group, nullptr,
              out_.query_moment.data() + at * out_.head_dim * out_.head_dim);
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

  // `heads` adjacent heads of `tokens` tokens, in the order of tokens.
  void AddRows(int64_t at, const float* rows, int64_t stride, int64_t tokens, int heads, double* sum,
               double* moment) noexcept {
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
          if (sum != nullptr) sum[c] += x[i][c];
        }
      }
      AddOuterProducts(x, n, moment);
    }
  }

  QueryMoments& out_;
  const std::vector<attention::AttentionSpec>& attention_;
  const int64_t skip_;
  ThreadPool& threads_;
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

}  // namespace

QueryMoments CollectQueryMoments(models::Model& model, const BackendFactory& make_backend,
                                 const formats::CacheLayout& layout, std::span<const int32_t> tokens, int64_t max_rows,
                                 ThreadPool& threads) {
  const models::ModelConfig& config = model.Config();
  if (config.UsesMla()) {
    throw InputError(fmt::format("{} stores latents (MLA), which have no +query", config.architecture));
  }
  QueryMoments result;
  result.layers = config.layers;
  result.kv_heads = config.kv_heads;
  result.head_dim = config.head_dim;
  const int64_t skip = layout.page_size;
  result.tokens = std::max<int64_t>(0, std::ssize(tokens) - skip);
  const size_t channels =
      static_cast<size_t>(config.layers) * static_cast<size_t>(config.kv_heads) * static_cast<size_t>(config.head_dim);
  result.amax.assign(2 * static_cast<size_t>(config.layers) * static_cast<size_t>(config.kv_heads), 0.0F);
  result.key_sum.assign(channels, 0.0);
  result.key_moment.assign(channels * static_cast<size_t>(config.head_dim), 0.0);
  result.query_moment = result.key_moment;
  const std::vector<attention::AttentionSpec> attention = model.AttentionLayers();
  MomentCollector collector(result, attention, skip, threads);
  ForwardObserved(model, make_backend, layout, tokens, max_rows, collector);
  if (collector.BadLayer() >= 0) {
    throw InputError(fmt::format("cannot calibrate: layer {} has keys, values or queries that are not finite",
                                 collector.BadLayer()));
  }
  Mirror(result.key_moment, config.head_dim);
  Mirror(result.query_moment, config.head_dim);
  return result;
}

}  // namespace kvanta::observe
