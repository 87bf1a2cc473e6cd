#include "attention/array_attention.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "attention/backends.h"
#include "base/device.h"
#include "formats/format.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;

// Number of rows of `width` values in `values`.
int64_t RowsOf(std::span<const float> values, int64_t width, const char* name) {
  if (width <= 0 || values.empty() || static_cast<int64_t>(values.size()) % width != 0) {
    throw InputError(
        fmt::format("{} has {} values, not one or more rows of {} (heads * head_dim)", name, values.size(), width));
  }
  return static_cast<int64_t>(values.size()) / width;
}

// Names of the formats with a static scale per KV head.
std::string StaticFormats() {
  std::vector<std::string_view> names;
  for (const formats::Format& format : formats::All()) {
    if (format.scaling.per_head) names.push_back(format.name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// A format without static scales would ignore them.
void CheckScales(const formats::SideScales& given, const formats::Side& side, const char* name,
                 const std::string& scheme) {
  if (given.scale.empty() || side.format->scaling.per_head) return;
  throw InputError(fmt::format("scheme {}: scales of {} are given, but {} has no static scales; formats that do: {}",
                               scheme, name, side.format->name, StaticFormats()));
}

// A scheme would ignore what it does not name.
void CheckUsed(const formats::SideScales& k, const formats::Side& side, const std::string& scheme) {
  const auto check = [&](bool given, bool used, const char* what, const char* modifiers) {
    if (given && !used) {
      throw InputError(fmt::format("scheme {}: {} of K are given, but K has no {}", scheme, what, modifiers));
    }
  };
  check(!k.mean.empty(), side.mean, "means", "+mean or +query");
  check(k.query != nullptr, side.query, "matrices", "+query");
  check(!k.outliers.empty(), side.outliers != 0, "outlier channels", "+outliers");
}

}  // namespace

ArrayAttentionResult RunArrayAttention(const ArrayAttention& options, std::span<const float> q,
                                       std::span<const float> k, std::span<const float> v, int64_t query_start) {
  const int64_t q_width = int64_t{options.heads} * options.head_dim;
  const int64_t kv_width = int64_t{options.kv_heads} * options.head_dim;
  const int64_t queries = RowsOf(q, q_width, "q");
  const int64_t tokens = RowsOf(k, kv_width, "k");
  if (v.size() != k.size()) throw InputError(fmt::format("k has {} values, v has {}", k.size(), v.size()));
  if (query_start < 0 || query_start + queries != tokens) {
    throw InputError(fmt::format("queries at positions [{}, {}) with {} keys: the last query must be the last token",
                                 query_start, query_start + queries, tokens));
  }
  if (options.threads < 1) throw InputError(fmt::format("threads is {}, needs at least 1", options.threads));

  const formats::CacheLayout layout =
      formats::PlanCache({KvScheme::Parse(options.scheme)}, {{options.kv_heads, options.head_dim}}, options.page_size);
  const formats::LayerScheme& layer = layout.layers[0];
  CheckScales(options.scales.k, layer.k, "K", options.scheme);
  CheckScales(options.scales.v, layer.v, "V", options.scheme);
  CheckUsed(options.scales.k, layer.k, options.scheme);
  const int64_t pages = (tokens + options.page_size - 1) / options.page_size;
  int64_t bytes = 0;
  for (const PageKind kind : cache::kPageKinds) bytes += pages * cache::BytesOf(layout.groups[0], kind);
  cache::PagePool pool(Cpu(), layout, {.budget_bytes = bytes, .poison_unused = true});
  cache::BlockTable table(static_cast<size_t>(pages));
  const cache::PageRef* const tables[] = {table.data()};
  for (cache::PageRef& page : table) {
    for (const PageKind kind : cache::kPageKinds) {
      if (pool.RecordBytes(0, kind) > 0) page.Of(kind) = pool.Allocate(0, kind);
    }
  }

  BackendConfig config;
  const float scale =
      options.softmax_scale != 0 ? options.softmax_scale : 1.0f / std::sqrt(static_cast<float>(options.head_dim));
  config.layers.push_back({.heads = options.heads,
                           .kv_heads = options.kv_heads,
                           .head_dim = options.head_dim,
                           .softmax_scale = scale,
                           .softcap = options.softcap,
                           .visibility = cache::SlidingWindow(options.sliding_window)});
  config.scales.push_back(options.scales);
  const std::unique_ptr<Backend> backend =
      MakeBackend(options.backend, pool, std::move(config), std::make_shared<ThreadPool>(options.threads));

  const auto step = [&](int64_t start, int64_t count, std::unique_ptr<Plan> plan) {
    const SequenceSpan span{.start = start, .tokens = static_cast<int>(count), .pages = tables};
    plan = backend->MakePlan({.sequences = {&span, 1}}, std::move(plan));
    backend->Append(*plan, 0, k.data() + start * kv_width, v.data() + start * kv_width, kv_width);
    return plan;
  };
  std::unique_ptr<Plan> plan;
  if (query_start > 0) plan = step(0, query_start, std::move(plan));
  plan = step(query_start, queries, std::move(plan));

  ArrayAttentionResult result;
  result.out.resize(q.size());
  backend->Run(*plan, 0, q.data(), q_width, result.out.data());
  result.cache_bytes = pool.UsedBytes();
  const AppendCounts counts = backend->Counts(0);
  result.saturated = counts.k.saturated + counts.v.saturated;
  return result;
}

}  // namespace kvanta::attention
