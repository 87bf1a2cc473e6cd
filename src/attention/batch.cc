#include "attention/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;

void CheckRecord(const cache::PagePool& pool, int group, PageKind kind, cache::PageId id, size_t sequence,
                 int64_t page) {
  if (pool.References(group, kind, id) > 0 && pool.IsOfRank(group, kind, id, pool.RankOfPage(group, page))) return;
  throw InputError(fmt::format("sequence {} of the batch: page {} has no {} record (KV cache group {}, id {})",
                               sequence, page, Name(kind), group, id));
}

void CheckOutliers(const std::vector<int>& channels, const AttentionSpec& layer, int count, size_t index) {
  const auto expected = static_cast<size_t>(layer.kv_heads) * static_cast<size_t>(count);
  if (channels.size() != expected) {
    throw InputError(
        fmt::format("layer {}: the scheme says +outliers={}, but there are {} outlier channels for {} KV "
                    "heads instead of {}; a scale file lists them (kvanta calibrate --outliers {})",
                    index, count, channels.size(), layer.kv_heads, expected, count));
  }
  for (size_t i = 0; i < channels.size(); ++i) {
    const int min_value = i % static_cast<size_t>(count) == 0 ? 0 : channels[i - 1] + 1;
    if (channels[i] < min_value || channels[i] >= layer.head_dim) {
      throw InputError(fmt::format("layer {}: outlier channel {}: a head's channels ascend, from 0 to {}", index,
                                   channels[i], layer.head_dim - 1));
    }
  }
}

// `needed_by`: the modifier that needs key means, or null.
void CheckScales(const formats::SideScales& side, const AttentionSpec& layer, const char* needed_by, size_t index,
                 char name) {
  if (side.scale.size() != static_cast<size_t>(layer.kv_heads)) {
    throw InputError(
        fmt::format("layer {}: {} {} scales for {} KV heads", index, side.scale.size(), name, layer.kv_heads));
  }
  for (const float scale : side.scale) {
    if (!(std::isfinite(scale) && scale > 0)) {
      throw InputError(fmt::format("layer {}: {} scale {} is not a finite number above 0", index, name, scale));
    }
  }
  if (needed_by == nullptr) return;
  const auto expected = static_cast<size_t>(layer.kv_heads) * static_cast<size_t>(layer.head_dim);
  if (side.mean.size() != expected) {
    throw InputError(fmt::format("layer {}: the scheme says +{}, but there are {} mean values instead of {}", index,
                                 needed_by, side.mean.size(), expected));
  }
  if (!std::ranges::all_of(side.mean, [](float mean) { return std::isfinite(mean); })) {
    throw InputError(fmt::format("layer {}: the {} means for +{} are not all finite", index, name, needed_by));
  }
}

void CheckQueryTransform(const formats::SideScales& side, const formats::Format& format, const AttentionSpec& layer,
                         size_t index) {
  if (side.query == nullptr) {
    throw InputError(
        fmt::format("layer {}: the scheme says +query, but there are no matrices for it; `kvanta calibrate MODEL "
                    "--query --out FILE.safetensors` makes them, for --quantization-param-path FILE.safetensors",
                    index));
  }
  if ((side.query->Allocation(0) != nullptr) != formats::IsAllocated(format.code)) {
    throw InputError(fmt::format("layer {}: the matrices are not those of {}", index, format.name));
  }
  if (side.query->kv_heads() != layer.kv_heads || side.query->head_dim() != layer.head_dim) {
    throw InputError(fmt::format("layer {}: +query matrices of {} KV heads of {} for {} of {}", index,
                                 side.query->kv_heads(), side.query->head_dim(), layer.kv_heads, layer.head_dim));
  }
}

// Splits a sequence's rows where the state after a token is stored, and checks the records. Drafted rows are a segment
// of their own.
void AddStates(const SequenceSpan& span, const cache::PagePool& pool, int group, size_t sequence,
               const cache::KvCacheGroup& spec, Batch& batch) {
  const cache::PageRef* table = span.pages[group];
  const int64_t end = span.start + span.tokens - span.drafts;
  const int64_t page_size = spec.page_size, last = (end - 1) / page_size;
  const PageKind kind = spec.WorkingKind();
  const auto record = [&](int64_t page) {
    CheckRecord(pool, group, kind, table[page].Of(kind), sequence, page);
    return table[page].Of(kind);
  };
  batch.first_segments.push_back(static_cast<int32_t>(batch.state_segments.size()));
  cache::StateSegment segment{.first_row = batch.rows};
  if (span.start > 0) segment.from = record((span.start - 1) / page_size);
  int64_t position = span.start;
  for (int64_t page = span.start / page_size; page <= last; ++page) {
    if (page != last && (spec.RoundsStates() || table[page].quantized == cache::kNoPage)) continue;
    segment.to = record(page);
    segment.tokens = static_cast<int32_t>(std::min(end, (page + 1) * page_size) - position);
    batch.state_segments.push_back(segment);
    position += segment.tokens;
    segment = {.first_row = segment.first_row + segment.tokens, .from = segment.to};
  }
  segment.tokens = span.drafts;
  if (span.drafts > 0) batch.state_segments.push_back(segment);
}

bool SeesBothDirections(const cache::KvCacheGroup& group) {
  return group.visibility.both_directions;
}

// Lists the pages that age in a step, and checks the records of later levels.
void AddAging(const SequenceSpan& span, const cache::PagePool& pool, int group, size_t sequence,
              const cache::KvCacheGroup& spec, Batch& batch) {
  const cache::PageRef* table = span.pages[group];
  const int64_t end = spec.FirstYoung(span.start + span.tokens), young = spec.FirstYoung(span.start);
  for (int64_t page = std::max<int64_t>(spec.ages.ageless, spec.FirstPage(span.start)); page < end; ++page) {
    for (const PageKind kind : cache::kAgedKinds) {
      const bool is_read = page < young ? spec.KeepsAged(kind, page, span.start) : spec.Reaches(kind, page);
      if (is_read) CheckRecord(pool, group, kind, table[page].Of(kind), sequence, page);
    }
    if (page >= young && spec.Reaches(PageKind::kAged, page)) {
      batch.aging[static_cast<size_t>(group)].push_back(table[page]);
    }
  }
}

}  // namespace

// In place: there are no more segments and sequences than before.
void AcceptDrafts(std::span<const int> accepted, Batch& batch) noexcept {
  const cache::StateStep step{.segments = batch.state_segments, .first_segments = batch.first_segments};
  size_t count = 0;
  int64_t first_row = 0;
  for (size_t sequence = 0; sequence < step.first_segments.size(); ++sequence) {
    const cache::StateSegment drafts = step.OfSequence(sequence).back();
    if (drafts.to != cache::kNoPage) continue;
    if (accepted[sequence] > 0) {
      batch.state_segments[count] = {
          .first_row = first_row, .tokens = accepted[sequence], .from = drafts.from, .to = drafts.from};
      batch.first_segments[count] = static_cast<int32_t>(count);
      ++count;
    }
    first_row += drafts.tokens;
  }
  batch.state_segments.resize(count);
  batch.first_segments.resize(count);
}

cache::StateStep StatesOf(const Batch& batch, const cache::PagePool& pool, int layer) noexcept {
  const formats::LayerScheme& scheme = pool.Layout().layers[static_cast<size_t>(layer)];
  const bool is_rounded = pool.Layout().state_grid != 0;
  const PageKind kind = is_rounded ? PageKind::kExact : PageKind::kQuantized;
  return {.segments = batch.state_segments,
          .first_segments = batch.first_segments,
          .base = pool.Base(scheme.group, kind) + (is_rounded ? scheme.exact_offset : scheme.offset),
          .record_bytes = pool.RecordBytes(scheme.group, kind)};
}

cache::KvCacheSpec SpecOf(const cache::PagePool& pool, const BackendConfig& config) {
  std::vector<cache::Visibility> layers;
  for (const AttentionSpec& layer : config.layers) layers.push_back(layer.visibility);
  return cache::KvCacheSpec(pool.Layout(), layers);
}

void MakeBatch(const BatchShape& shape, const cache::PagePool& pool, const cache::KvCacheSpec& spec, Batch& batch) {
  const int64_t page_size = spec.page_size;
  batch.sequences.clear();
  batch.writes.resize(spec.groups.size());
  for (std::vector<PageWrite>& writes : batch.writes) writes.clear();
  batch.aging.resize(spec.groups.size());
  for (std::vector<cache::PageRef>& pages : batch.aging) pages.clear();
  batch.state_segments.clear();
  batch.first_segments.clear();
  batch.rows = 0;
  for (size_t s = 0; s < shape.sequences.size(); ++s) {
    const SequenceSpan& span = shape.sequences[s];
    if (span.start < 0 || span.tokens < 1 || span.pages == nullptr) {
      throw InputError(
          fmt::format("sequence {} of the batch: start {}, {} tokens, {} pages; needs start >= 0, tokens "
                      ">= 1 and block tables",
                      s, span.start, span.tokens, span.pages == nullptr ? "no" : "some"));
    }
    if (span.drafts < 0 || span.drafts >= span.tokens) {
      throw InputError(fmt::format("sequence {} of the batch: {} drafts of {} tokens; one must be no draft", s,
                                   span.drafts, span.tokens));
    }
    const int64_t end = span.start + span.tokens;
    const int64_t own_page = span.start / page_size;
    if (span.start > 0 && std::ranges::any_of(spec.groups, SeesBothDirections)) {
      throw InputError(fmt::format(
          "sequence {} of the batch: start {}; attention in both directions computes a sequence in one step", s,
          span.start));
    }
    for (size_t g = 0; g < spec.groups.size(); ++g) {
      const cache::KvCacheGroup& group = spec.groups[g];
      if (group.IsRecurrent()) {
        AddStates(span, pool, static_cast<int>(g), s, group, batch);
        continue;
      }
      const cache::PageRef* table = span.pages[g];
      for (int64_t page = group.FirstPage(span.start); page * page_size < end; ++page) {
        if (group.NeedsQuantized(page, (page + 1) * page_size <= end) && group.KeepsQuantized(page, span.start)) {
          const PageKind level = group.ages.HasFloor() ? HeldLevel(table[page]) : PageKind::kQuantized;
          CheckRecord(pool, static_cast<int>(g), level, table[page].Of(level), s, page);
        }
        if (group.NeedsExact(page, page >= own_page - group.exact_before)) {
          CheckRecord(pool, static_cast<int>(g), PageKind::kExact, table[page].exact, s, page);
        }
      }
      if (group.ages.IsUsed()) AddAging(span, pool, static_cast<int>(g), s, group, batch);
      for (int64_t page = own_page; page * page_size < end; ++page) {
        if (!pool.IsOwnPage(static_cast<int>(g), page)) continue;
        const int64_t first = std::max(span.start, page * page_size);
        const int64_t last = std::min(end, (page + 1) * page_size);
        batch.writes[g].push_back({.page = table[page],
                                   .first_slot = static_cast<int>(first - page * page_size),
                                   .last_slot = static_cast<int>(last - page * page_size),
                                   .first_row = batch.rows + first - span.start});
      }
    }
    batch.sequences.push_back({span, batch.rows});
    batch.rows += span.tokens;
  }
}

int TopkOf(std::span<const AttentionSpec> layers) noexcept {
  const auto sparse = std::ranges::find_if(layers, [](const AttentionSpec& layer) { return layer.index_topk > 0; });
  return sparse == layers.end() ? 0 : sparse->index_topk;
}

namespace {

// Attention to rows that are K and V in one, in a window and compressed.
void CheckSharedKv(const BackendConfig& config, const formats::CacheLayout& layout, size_t index,
                   std::string_view backend) {
  const AttentionSpec& layer = config.layers[index];
  const formats::LayerScheme& scheme = layout.layers[index];
  if (backend == "reference") {
    throw InputError(
        fmt::format("layer {}: backend {} does not attend to compressed keys and values (DeepSeek V4); cpu and cuda do",
                    index, backend));
  }
  const bool has_selection =
      layer.index_topk == 0 || (layer.index_topk == TopkOf(config.layers) && layer.entries_layer >= 0);
  if (!has_selection || layer.softcap != 0 || layer.entries_layer >= static_cast<int>(layout.layers.size())) {
    throw InputError(fmt::format("layer {}: attention to {} of the entries in layer {} of {}, softcap {}", index,
                                 layer.index_topk, layer.entries_layer, layout.layers.size(), layer.softcap));
  }
  if (layer.entries_layer < 0) return;
  const formats::LayerScheme& entries = layout.layers[static_cast<size_t>(layer.entries_layer)];
  if (!entries.HasEntries() || !(entries.k == scheme.k) || entries.shape.head_dim != scheme.shape.head_dim) {
    throw InputError(fmt::format("layer {}: its compressed entries, in layer {}, are not rows of {} channels in {}",
                                 index, layer.entries_layer, scheme.shape.head_dim, scheme.k.format->name));
  }
}

}  // namespace

BackendConfig CheckConfig(BackendConfig config, const formats::CacheLayout& layout, BackendLimit limit) {
  if (config.layers.size() != layout.layers.size()) {
    throw InputError(
        fmt::format("the attention of {} layers, but a cache of {}", config.layers.size(), layout.layers.size()));
  }
  if (config.scales.empty()) config.scales.resize(config.layers.size());
  if (config.scales.size() != config.layers.size()) {
    throw InputError(
        fmt::format("KV scales of {} layers, but a cache of {}", config.scales.size(), layout.layers.size()));
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const AttentionSpec& layer = config.layers[i];
    const formats::LayerScheme& scheme = layout.layers[i];
    if (layer.kv_heads == 0 && scheme.IsRecurrent()) continue;
    if (scheme.shared_kv) CheckSharedKv(config, layout, i, limit.backend);
    if (!scheme.shared_kv && (layer.index_topk != 0 || scheme.keys_only) &&
        (layer.index_topk < 1 || layer.index_topk != TopkOf(config.layers) || !scheme.SharesCell() ||
         !layer.visibility.IsFull() || !layer.sinks.empty())) {
      throw InputError(
          fmt::format("layer {}: sparse attention to {} tokens: it is of latents without a window or sinks, to as many "
                      "tokens in all layers ({})",
                      i, layer.index_topk, TopkOf(config.layers)));
    }
    if (layer.index_topk != 0 && !scheme.ages.empty()) {
      throw InputError(fmt::format("layer {}: sparse attention does not go with ages or a floor of its cache", i));
    }
    if (layer.visibility.both_directions && (scheme.SharesCell() || !scheme.ages.empty())) {
      throw InputError(
          fmt::format("layer {}: attention in both directions is without latents, ages and a floor of its cache", i));
    }
    if (layer.kv_heads != scheme.kv_heads || layer.head_dim != scheme.shape.head_dim ||
        layer.rope_dim != scheme.rope_dim) {
      throw InputError(fmt::format("layer {}: attention has {} KV heads of {} + {}, the cache {} of {} + {}", i,
                                   layer.kv_heads, layer.head_dim, layer.rope_dim, scheme.kv_heads,
                                   scheme.shape.head_dim, scheme.rope_dim));
    }
    if (layer.kv_heads < 1 || layer.heads < 1 || layer.heads % layer.kv_heads != 0) {
      throw InputError(
          fmt::format("layer {}: {} query heads are not a multiple of {} KV heads", i, layer.heads, layer.kv_heads));
    }
    const int longest = scheme.SharesCell() ? formats::kMaxLatentRank : limit.head_dim;
    if (layer.head_dim < 8 || layer.head_dim > longest || layer.head_dim % 8 != 0) {
      throw InputError(fmt::format("layer {}: head_dim {}: backend {} takes multiples of 8 from 8 to {}", i,
                                   layer.head_dim, limit.backend, longest));
    }
    if (!(std::isfinite(layer.softmax_scale) && layer.softmax_scale > 0) || !(layer.softcap >= 0) ||
        !std::isfinite(layer.softcap) || (!layer.visibility.IsFull() && layer.visibility.span < 1)) {
      throw InputError(
          fmt::format("layer {}: softmax_scale {} must be above 0, softcap {} at least 0 (0: none) and "
                      "a window or chunk ({} tokens) at least 1",
                      i, layer.softmax_scale, layer.softcap, layer.visibility.span));
    }
    const bool finite_sinks = std::ranges::all_of(layer.sinks, [](float sink) { return std::isfinite(sink); });
    if ((!layer.sinks.empty() && std::ssize(layer.sinks) != layer.heads) || !finite_sinks) {
      throw InputError(
          fmt::format("layer {}: {} attention sinks for {} query heads; expected none, or one finite "
                      "logit for each",
                      i, layer.sinks.size(), layer.heads));
    }
    formats::LayerScales& scales = config.scales[i];
    if (scales.k.scale.empty()) scales.k.scale.assign(static_cast<size_t>(layer.kv_heads), 1.0f);
    if (scales.v.scale.empty()) scales.v.scale.assign(static_cast<size_t>(layer.kv_heads), 1.0f);
    if (scheme.k.query) CheckQueryTransform(scales.k, *scheme.k.format, layer, i);
    CheckScales(scales.k, layer, scheme.k.query ? "query" : scheme.k.mean ? "mean" : nullptr, i, 'k');
    CheckScales(scales.v, layer, nullptr, i, 'v');
    if (scheme.k.outliers != 0) CheckOutliers(scales.k.outliers, layer, scheme.k.outliers, i);
  }
  return config;
}

const formats::Format& ExactFormat() noexcept {
  static const formats::Format& format = *formats::FindOrNull("bf16");
  return format;
}

}  // namespace kvanta::attention
