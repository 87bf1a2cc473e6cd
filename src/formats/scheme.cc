#include "formats/scheme.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/math.h"
#include "formats/age_text.h"
#include "formats/format.h"
#include "formats/names.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

constexpr int64_t kStateAlignment = 64;  // bytes of a cache line

// canonical: of compressed entries, of which a page has any number.
Side ResolveSide(const KvSide& side, bool is_key, CellShape shape, bool canonical = false) {
  const Format& format = OnSide(Find(side.format), is_key);
  const CellShape padded = PaddedShape(format, shape);
  const bool hadamard = side.hadamard && !side.query;
  return Side{.format = &format,
              .hadamard = hadamard,
              .mean = side.mean || side.query,
              .query = side.query,
              .outliers = side.outliers,
              .shape = padded,
              .unused_channels = hadamard ? 0 : padded.head_dim - shape.head_dim,
              .sections = canonical ? PlanRows(format, padded) : PlanCell(format, padded)};
}

void CheckQuery(const KvScheme& scheme) {
  if (!scheme.k.hadamard) {
    throw InputError(
        fmt::format("scheme {}: +query takes the place of K's Hadamard transform, which {} does not have; "
                    "add +hadamard to K, or leave +query out",
                    scheme.ToString(), scheme.k.format));
  }
  if (Find(scheme.k.format).scaling.per_head) {
    throw InputError(
        fmt::format("scheme {}: +query does not go with the static scales of {}, which are of keys as they "
                    "are; formats with scales of their own for each token do",
                    scheme.ToString(), scheme.k.format));
  }
  if (scheme.k.mean) {
    throw InputError(
        fmt::format("scheme {}: +query subtracts the key mean already; leave +mean out", scheme.ToString()));
  }
  if (scheme.exact == ExactPages::kNone || scheme.sink_pages < 1) {
    throw InputError(
        fmt::format("scheme {}: +query needs an exact first page (+exact=open or +exact=2, +sink=1 or "
                    "more): the key of the first token, which all queries attend to, is far from the mean",
                    scheme.ToString()));
  }
}

void CheckScheme(const KvScheme& scheme, CellShape shape) {
  if (IsAllocated(Find(scheme.k.format).code) && (!scheme.k.query || scheme.k.outliers != 0)) {
    throw InputError(fmt::format("scheme {}: {} {}", scheme.ToString(), scheme.k.format,
                                 scheme.k.query ? "has no +outliers: its channels are not those of keys"
                                                : "is made of calibrated matrices, so it is always +query"));
  }
  if (scheme.v.mean || scheme.v.query || scheme.v.outliers != 0) {
    const char* modifier = scheme.v.mean ? "mean" : scheme.v.query ? "query" : "outliers";
    throw InputError(fmt::format("scheme {}: only K takes +{}", scheme.ToString(), modifier));
  }
  if (scheme.k.query) CheckQuery(scheme);
  const int outliers = scheme.k.outliers;
  if (outliers < 0 || outliers > std::min(KvScheme::kMaxOutliers, shape.head_dim) || outliers % 2 != 0) {
    throw InputError(fmt::format("scheme {}: outliers={} must be an even number from 0 to {} at head_dim {}",
                                 scheme.ToString(), outliers, std::min(KvScheme::kMaxOutliers, shape.head_dim),
                                 shape.head_dim));
  }
  if (scheme.sink_pages < 0 || scheme.sink_pages > KvScheme::kMaxSinkPages) {
    throw InputError(fmt::format("sink={}: must be from 0 to {}", scheme.sink_pages, KvScheme::kMaxSinkPages));
  }
  if (scheme.sink_pages > 0 && scheme.exact == ExactPages::kNone) {
    throw InputError(
        fmt::format("scheme {}: sink={} needs exact=open or exact=2", scheme.ToString(), scheme.sink_pages));
  }
  const Format& k = Find(scheme.k.format);
  if (k.scaling.token_group != 0 && scheme.exact == ExactPages::kNone) {
    throw InputError(fmt::format("scheme {}: {} encodes keys when their page closes, so it needs exact=open or exact=2",
                                 scheme.ToString(), k.name));
  }
}

void CheckApart(const KvScheme& scheme) {
  for (const KvSide* side : {&scheme.k, &scheme.v}) {
    const Format& format = Find(side->format);
    if (format.latents != MlaSupport::kRequired) continue;
    throw InputError(
        fmt::format("{} stores the latents of MLA, but this model's layers have K and V apart; formats "
                    "for them: {}",
                    format.name, NamesOf([](const Format& each) { return each.latents != MlaSupport::kRequired; })));
  }
}

void CheckIndexKeys(const KvScheme& scheme, const LayerShape& shape) {
  const Format& format = Find(scheme.k.format);
  if (scheme.k.format != scheme.v.format || format.latents == MlaSupport::kNo) {
    throw InputError(fmt::format("scheme {}: keys of an indexer are one row per token; formats for them: {}",
                                 scheme.ToString(),
                                 NamesOf([](const Format& each) { return each.latents != MlaSupport::kNo; })));
  }
  if (scheme.k.mean || scheme.k.query || scheme.k.outliers != 0) {
    throw InputError(
        fmt::format("scheme {}: keys of an indexer take no +mean, +query or +outliers", scheme.ToString()));
  }
  if (shape.kv_heads != 1 || shape.head_dim > kMaxLatentRank || shape.rope_dim != 0) {
    throw InputError(fmt::format("{} keys of {} channels of an indexer: one of up to {} is supported", shape.kv_heads,
                                 shape.head_dim, kMaxLatentRank));
  }
}

void CheckLatents(const KvScheme& scheme, const LayerShape& shape) {
  const Format& format = Find(scheme.k.format);
  if (scheme.k.format != scheme.v.format || format.latents == MlaSupport::kNo) {
    throw InputError(fmt::format("scheme {}: this model's layers store K and V as one latent (MLA); formats for it: {}",
                                 scheme.ToString(),
                                 NamesOf([](const Format& each) { return each.latents != MlaSupport::kNo; })));
  }
  if (scheme.k.hadamard || scheme.v.hadamard || scheme.k.mean || scheme.k.query || scheme.k.outliers != 0) {
    throw InputError(
        fmt::format("scheme {}: latents (MLA) are stored as they are, without +hadamard, +mean, +query or "
                    "+outliers",
                    scheme.ToString()));
  }
  if (format.latents == MlaSupport::kYes && scheme.exact != ExactPages::kNone) {
    throw InputError(
        fmt::format("scheme {}: latents (MLA) in {} are exact without exact pages", scheme.ToString(), format.name));
  }
  if (shape.kv_heads != 1 || shape.head_dim > kMaxLatentRank || shape.rope_dim < 2 || shape.rope_dim > kMaxRopeDim ||
      shape.rope_dim % 2 != 0) {
    throw InputError(
        fmt::format("{} latents of rank {} with {} rotated channels: one of rank up to {}, with an even "
                    "number of channels up to {}, is supported",
                    shape.kv_heads, shape.head_dim, shape.rope_dim, kMaxLatentRank, kMaxRopeDim));
  }
}

// Rows that are K and V in one, or keys of an indexer, that stand for several tokens.
void CheckCompressed(const KvScheme& scheme, const LayerShape& shape, int page_size) {
  const Format& format = Find(scheme.k.format);
  const auto is_row = [](const Format& each) { return each.latents != MlaSupport::kNo; };
  if (scheme.k.format != scheme.v.format || !is_row(format) || scheme.exact != ExactPages::kNone ||
      !scheme.ages.empty()) {
    throw InputError(
        fmt::format("scheme {}: this model's layers store K and V as one row, and compressed ones, without exact "
                    "pages, ages or a floor; formats for them: {}",
                    scheme.ToString(), NamesOf(is_row)));
  }
  if (shape.shared_kv && (scheme.k.hadamard || scheme.v.hadamard || scheme.k.mean || scheme.k.query ||
                          scheme.k.outliers != 0 || shape.kv_heads != 1 || shape.head_dim > kMaxLatentRank)) {
    throw InputError(
        fmt::format("scheme {}: rows that are K and V ({} of {} channels; one of up to {} is supported) "
                    "are stored as they are, without +hadamard, +mean, +query or +outliers",
                    scheme.ToString(), shape.kv_heads, shape.head_dim, kMaxLatentRank));
  }
  if (shape.row_tokens < 1 || (page_size % shape.row_tokens != 0 && shape.row_tokens % page_size != 0)) {
    throw InputError(fmt::format("compressed entries of {} tokens with a page size of {}: one must divide the other",
                                 shape.row_tokens, page_size));
  }
  constexpr int kMinRows = 16;
  if (shape.keys_only && page_size / shape.row_tokens < kMinRows) {
    throw InputError(fmt::format("page size {}: an indexer's keys of {} tokens each need pages of at least {}",
                                 page_size, shape.row_tokens, kMinRows * shape.row_tokens));
  }
}

// Precision by age: what the later levels are encoded from, and where.
void CheckAges(const LayerScheme& layer) {
  const KvScheme& scheme = layer.scheme;
  const auto refuse = [&](std::string_view why) {
    throw InputError(fmt::format("scheme {}: {}", scheme.ToString(), why));
  };
  if (scheme.k.query) refuse("ages and floors do not go with +query");
  if (IsTrellis(layer.k.format->code) || IsTrellis(layer.v.format->code)) {
    refuse("later levels are encoded from the first one, which must not be a trellis; int8 and int4 can be");
  }
  if (static_cast<int>(scheme.ages.size()) > KvScheme::kMaxAges) {
    refuse(fmt::format("{} ages, there are at most {}", scheme.ages.size(), KvScheme::kMaxAges));
  }
}

// The later levels of a layer, in records of its group.
void PlanAges(LayerScheme& layer, GroupBytes& group) {
  CheckAges(layer);
  int64_t bytes_before = layer.HeadBytes(), later_bytes = 0;
  int pages_before = std::max(0, layer.exact_pages - 1);
  layer.ageless_pages = layer.sink_pages;
  for (size_t i = 0; i < layer.scheme.ages.size(); ++i) {
    const KvAge& given = layer.scheme.ages[i];
    const auto refuse = [&](const std::string& why) {
      throw InputError(fmt::format("scheme {}: {}", layer.scheme.ToString(), why));
    };
    const int page_size = layer.shape.tokens;
    AgeScheme age{.k = ResolveSide(given.k, true, layer.shape), .v = ResolveSide(given.v, false, layer.shape)};
    const bool by_age = !layer.scheme.HasFloor();
    if (by_age) age.pages = static_cast<int>(given.tokens / page_size);
    if (by_age && (given.tokens % page_size != 0 || age.pages <= pages_before)) {
      refuse(fmt::format("the age of {} tokens must be a multiple of the page size, {}, from {} on", given.tokens,
                         page_size, (pages_before + 1) * page_size));
    }
    for (const Side* side : {&age.k, &age.v}) {
      const Format& format = *side->format;
      if (IsAllocated(format.code) || format.scaling.per_head) {
        refuse(fmt::format("{} has {}, which later levels do not; other formats can be one", format.name,
                           format.scaling.per_head ? "static scales" : "calibrated matrices"));
      }
      if (layer.SharesCell() && format.latents == MlaSupport::kNo) {
        refuse(fmt::format("{} does not store latents (MLA)", format.name));
      }
      if (!layer.SharesCell() && format.latents == MlaSupport::kRequired) {
        refuse(fmt::format("{} stores the latents of MLA, but this model's layers have K and V apart", format.name));
      }
    }
    const auto is_padded = [&](const Side& side) { return side.shape.head_dim != layer.shape.head_dim; };
    if (is_padded(layer.k) || is_padded(layer.v) || is_padded(age.k) || is_padded(age.v)) {
      refuse(fmt::format("levels take heads of whole blocks of their formats; those of {} channels would be padded",
                         layer.shape.head_dim));
    }
    if (layer.SharesCell() && given.k.format != given.v.format) refuse("K and V are one latent (MLA)");
    // Later levels are encoded from the first one, without these parts of a row.
    age.k.mean = layer.k.mean;
    age.k.outliers = layer.k.outliers;
    age.head_bytes = age.k.sections.bytes + layer.UnquantizedBytes() + (layer.SharesCell() ? 0 : age.v.sections.bytes);
    if (age.head_bytes >= bytes_before) {
      refuse(fmt::format("level {} takes {} bytes of a head and page, no fewer than the {} before it", LevelText(given),
                         age.head_bytes, bytes_before));
    }
    age.offset = group.age_bytes[i];
    group.age_bytes[i] += layer.kv_heads * age.head_bytes;
    bytes_before = age.head_bytes;
    pages_before = age.pages;
    layer.ageless_pages = std::max(layer.ageless_pages, given.sink_pages);
    layer.ages.push_back(age);
    later_bytes += age.head_bytes;
  }
  // A page that stepped down once keeps the record of the level after that, which is encoded from the first one too.
  if (layer.scheme.HasFloor() && later_bytes >= layer.HeadBytes()) {
    throw InputError(
        fmt::format("scheme {}: both later levels take {} bytes of a head and page, no fewer than the {} of the first; "
                    "give one floor",
                    layer.scheme.ToString(), later_bytes, layer.HeadBytes()));
  }
}

}  // namespace

CacheLayout PlanCache(const std::vector<KvScheme>& schemes, const std::vector<LayerShape>& shapes, int page_size,
                      const std::vector<int>& groups, const StateRounding& states) {
  if (schemes.size() != shapes.size() || schemes.empty()) {
    throw InputError(fmt::format("{} schemes for {} layers: one per layer is needed", schemes.size(), shapes.size()));
  }
  CacheLayout layout;
  layout.page_size = page_size;
  layout.state_code = states.code;
  layout.state_grid = states.code == StateCode::kFloat32 ? 0 : states.grid;
  layout.groups.resize(groups.empty() ? 1 : static_cast<size_t>(*std::ranges::max_element(groups)) + 1);
  for (size_t i = 0; i < schemes.size(); ++i) {
    LayerScheme layer;
    layer.scheme = schemes[i];
    layer.shape = {.tokens = std::max(1, page_size / std::max(1, shapes[i].row_tokens)),
                   .head_dim = shapes[i].head_dim};
    layer.kv_heads = shapes[i].kv_heads;
    layer.rope_dim = shapes[i].rope_dim;
    layer.keys_only = shapes[i].keys_only;
    layer.shared_kv = shapes[i].shared_kv;
    layer.row_tokens = shapes[i].row_tokens;
    layer.state = shapes[i].state;
    layer.state_bytes = RoundUp(layer.state.Bytes(), kStateAlignment);
    const bool is_coded = layer.IsRecurrent() && states.code != StateCode::kFloat32;
    if (layer.kv_heads < 1 && !layer.IsRecurrent()) {
      throw InputError(fmt::format("layer {}: kv_heads {} must be at least 1", i, layer.kv_heads));
    }
    try {
      if (layer.shared_kv || layer.row_tokens != 1) CheckCompressed(layer.scheme, shapes[i], page_size);
      if (layer.keys_only) {
        CheckIndexKeys(layer.scheme, shapes[i]);
      } else if (layer.rope_dim != 0) {
        CheckLatents(layer.scheme, shapes[i]);
      } else if (!layer.shared_kv) {
        CheckApart(layer.scheme);
      }
      CheckScheme(layer.scheme, layer.shape);
      layer.k = ResolveSide(layer.scheme.k, true, layer.shape, layer.HasEntries());
      layer.v = ResolveSide(layer.scheme.v, false, layer.shape, layer.HasEntries());
    } catch (const InputError& error) {
      throw InputError(fmt::format("layer {}: {}", i, error.what()));
    }
    layer.unquantized_format =
        layer.SharesCell() && layer.k.format->latents == MlaSupport::kYes ? layer.k.format : &Find("bf16");
    layer.exact_open = layer.scheme.exact != ExactPages::kNone || is_coded;
    layer.exact_pages = static_cast<int>(layer.scheme.exact);
    layer.sink_pages = layer.scheme.sink_pages;
    layer.group = groups.empty() ? 0 : groups.at(i);
    GroupBytes& group = layout.groups.at(static_cast<size_t>(layer.group));
    layer.offset = group.page_bytes;
    layer.bytes = layer.kv_heads * layer.HeadBytes();
    if (layer.IsRecurrent()) layer.bytes = RoundUp(CodedStateBytes(states.code, layer.state), kStateAlignment);
    layer.exact_offset = group.exact_page_bytes;
    layer.exact_bytes = layer.exact_open ? layer.kv_heads * layer.ExactHeadBytes() : 0;
    if (is_coded) layer.exact_bytes = layer.state_bytes;
    if (!layer.scheme.ages.empty() && !layer.IsRecurrent()) {
      try {
        PlanAges(layer, group);
      } catch (const InputError& error) {
        throw InputError(fmt::format("layer {}: {}", i, error.what()));
      }
    }
    group.page_bytes += layer.bytes;
    group.exact_page_bytes += layer.exact_bytes;
    if (layer.IsRecurrent()) {
      layout.state_bytes += layer.bytes + layer.exact_bytes;
    } else {
      layout.page_bytes += layer.bytes;
      layout.exact_page_bytes += layer.exact_bytes;
    }
    layout.layers.push_back(std::move(layer));
  }
  for (const GroupBytes& group : layout.groups) {
    for (size_t age = 0; age < group.age_bytes.size(); ++age) layout.age_bytes[age] += group.age_bytes[age];
  }
  return layout;
}

RowTransform TransformOf(const Side& side, const SideScales& scales, int head, int head_dim) noexcept {
  RowTransform transform{.head_dim = head_dim, .padding = side.shape.head_dim - head_dim, .hadamard = side.hadamard};
  if (side.mean) transform.mean = scales.mean.data() + int64_t{head} * head_dim;
  if (side.query) {
    transform.key_matrix = scales.query->KeyMatrix(head);
    transform.query_matrix = scales.query->QueryMatrix(head);
  }
  if (side.outliers != 0) {
    const auto count = static_cast<size_t>(side.outliers);
    transform.outliers = std::span(scales.outliers).subspan(static_cast<size_t>(head) * count, count);
  }
  return transform;
}

bool CacheLayout::UsesScales() const {
  return std::ranges::any_of(layers, [](const auto& layer) { return layer.k.UsesScales() || layer.v.UsesScales(); });
}

size_t CacheLayout::RunEnd(size_t first) const {
  const auto same = [&](const LayerScheme& layer) {
    return layer.scheme == layers[first].scheme && layer.shape == layers[first].shape &&
           layer.kv_heads == layers[first].kv_heads && layer.rope_dim == layers[first].rope_dim &&
           layer.keys_only == layers[first].keys_only && layer.shared_kv == layers[first].shared_kv &&
           layer.row_tokens == layers[first].row_tokens && layer.state == layers[first].state &&
           layer.group == layers[first].group;
  };
  size_t end = first + 1;
  while (end < layers.size() && same(layers[end])) ++end;
  return end;
}

std::string CacheLayout::Identity() const {
  std::string text = fmt::format("kvanta-cells-1;page={}", page_size);
  for (size_t first = 0; first < layers.size();) {
    const LayerScheme& layer = layers[first];
    const size_t end = RunEnd(first);
    if (layer.IsRecurrent()) {
      text += fmt::format(";layers {}-{}: recurrent, {} bytes", first, end - 1, layer.bytes);
      if (state_code != StateCode::kFloat32) {
        text += fmt::format(" {}-1 at multiples of {}", Name(state_code), state_grid);
      }
    } else {
      text += fmt::format(";layers {}-{}: {} kv_heads={} head_dim={}", first, end - 1, layer.scheme.ToString(),
                          layer.kv_heads, layer.shape.head_dim);
      for (const auto& [name, side] : {std::pair("k", &layer.k), {"v", &layer.v}}) {
        if (side->shape != layer.shape) text += fmt::format(" {}_cells={}", name, side->shape.head_dim);
      }
    }
    if (layer.keys_only) {
      text += " keys_only";
    } else if (layer.shared_kv) {
      text += " shared_kv";
    } else if (layer.SharesCell()) {
      text += fmt::format(" rope_dim={}", layer.rope_dim);
    }
    if (layer.row_tokens != 1) text += fmt::format(" row_tokens={}", layer.row_tokens);
    if (groups.size() > 1) text += fmt::format(" group={}", layer.group);
    first = end;
  }
  return text;
}

}  // namespace kvanta::formats
