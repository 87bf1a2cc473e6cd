#include "formats/page_header.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/quote.h"
#include "formats/transform.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxKvHeads = 65536;
constexpr int64_t kMaxRowTokens = 65536;
constexpr int64_t kMaxStateBytes = int64_t{1} << 40;

// The exact encoding of one side, spelled out: a reader compares it with its own.
Json SideJson(const Side& side, int head_dim) {
  const Format& format = *side.format;
  const Scaling& scaling = format.scaling;
  Json json = {{"format", side.format->name}, {"code", Name(format.code)}, {"code_bits", format.code_bits}};
  if (scaling.per_head) json["head_scale"] = "f32";
  if (scaling.block != ScaleType::kNone) {
    json["block"] = BlockChannels(scaling, head_dim);
    json["block_scale"] = Name(scaling.block);
  }
  if (scaling.block_offset) json["block_zero"] = "fp16";
  if (scaling.token != ScaleType::kNone) json["token_scale"] = Name(scaling.token);
  if (scaling.token_offset) json["token_zero"] = "fp16";
  if (scaling.token_group != 0) {
    json["tile"] = scaling.token_group;
    json["channel_scale"] = scaling.channel_bits ? "deviations and bits" : "fp16";
    if (!scaling.channel_bits) json["channel_zero"] = "fp16";
  }
  json["hadamard_block"] = side.hadamard ? HadamardBlock(side.shape.head_dim) : 0;
  json["mean"] = side.mean;
  if (side.query) json["query"] = "f32";
  if (side.outliers != 0) json["outliers"] = side.outliers;
  if (side.shape.head_dim != head_dim) json["padded_head_dim"] = side.shape.head_dim;
  return json;
}

// Consecutive layers of one scheme and shape are one entry.
Json LayersJson(const CacheLayout& layout) {
  Json entries = Json::array();
  for (size_t first = 0; first < layout.layers.size();) {
    const LayerScheme& layer = layout.layers[first];
    const size_t end = layout.RunEnd(first);
    if (layer.IsRecurrent()) {
      entries.push_back({{"layers", {first, end - 1}},
                         {"scheme", layer.scheme.ToString()},
                         {"head_dim", layer.shape.head_dim},
                         {"state_bytes", layer.state_bytes},
                         {"group", layer.group}});
      first = end;
      continue;
    }
    entries.push_back({{"layers", {first, end - 1}},
                       {"scheme", layer.scheme.ToString()},
                       {"kv_heads", layer.kv_heads},
                       {"head_dim", layer.shape.head_dim},
                       {"k", SideJson(layer.k, layer.shape.head_dim)}});
    if (layout.groups.size() > 1) entries.back()["group"] = layer.group;
    if (layer.keys_only) {
      entries.back()["keys_only"] = true;
    } else if (layer.shared_kv) {
      entries.back()["shared_kv"] = true;
    } else if (layer.SharesCell()) {
      entries.back()["rope_dim"] = layer.rope_dim;
    } else {
      entries.back()["v"] = SideJson(layer.v, layer.shape.head_dim);
    }
    if (layer.row_tokens != 1) entries.back()["row_tokens"] = layer.row_tokens;
    for (const AgeScheme& age : layer.ages) {
      Json level = Json::object();
      if (!layer.scheme.HasFloor()) level["tokens"] = int64_t{age.pages} * layer.shape.tokens;
      level["k"] = SideJson(age.k, layer.shape.head_dim);
      if (!layer.SharesCell()) level["v"] = SideJson(age.v, layer.shape.head_dim);
      entries.back()["ages"].push_back(std::move(level));
    }
    first = end;
  }
  return entries;
}

Json ScalesJson(const PageHeader& header) {
  Json layers = Json::object();
  for (size_t i = 0; i < header.scales.size(); ++i) {
    const LayerScheme& layer = header.layout.layers[i];
    Json json = Json::object();
    const auto add = [&](const char* prefix, const Side& side, const SideScales& scales) {
      if (side.format->scaling.per_head) json[std::string(prefix) + "_scale"] = scales.scale;
      if (side.mean) json[std::string(prefix) + "_mean"] = scales.mean;
      if (side.query) json[std::string(prefix) + "_query"] = scales.query ? scales.query->Hash() : scales.query_hash;
      if (side.outliers != 0) json[std::string(prefix) + "_outliers"] = scales.outliers;
    };
    add("k", layer.k, header.scales[i].k);
    add("v", layer.v, header.scales[i].v);
    if (!json.empty()) layers[std::to_string(i)] = std::move(json);
  }
  return layers;
}

const Json& Member(const Json& object, const char* key) {
  if (!object.is_object() || !object.contains(key)) throw InputError(fmt::format("the header lacks '{}'", key));
  return object.at(key);
}

std::string Text(const Json& object, const char* key) {
  const Json& value = Member(object, key);
  if (!value.is_string()) throw InputError(fmt::format("'{}' is not a text", key));
  return value.get<std::string>();
}

int64_t Integer(const Json& value, const char* key, int64_t min, int64_t max) {
  // Unsigned values above the largest int64 would wrap: compare as what they are.
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(max)
                                               : value.is_number_integer() && value.get<int64_t>() <= max;
  if (!fits || value.get<int64_t>() < min) {
    throw InputError(fmt::format("'{}' is not an integer from {} to {}", key, min, max));
  }
  return value.get<int64_t>();
}

std::vector<float> Floats(const Json& object, const std::string& key, int64_t size, bool positive) {
  const Json& value = Member(object, key.c_str());
  if (!value.is_array() || value.size() != static_cast<size_t>(size)) {
    throw InputError(fmt::format("'{}' is not a list of {} numbers", key, size));
  }
  std::vector<float> floats;
  for (const Json& element : value) {
    const float number = element.is_number() ? element.get<float>() : std::nanf("");
    if (!std::isfinite(number) || (positive && !(number > 0.0F))) {
      throw InputError(fmt::format("'{}' has a value that is not finite{}", key, positive ? " and above 0" : ""));
    }
    floats.push_back(number);
  }
  return floats;
}

// Lists of channels of all heads, concatenated, each ascending.
std::vector<int> Channels(const Json& object, const std::string& key, const LayerScheme& layer, int count) {
  const Json& value = Member(object, key.c_str());
  if (!value.is_array() || value.size() != static_cast<size_t>(layer.kv_heads) * static_cast<size_t>(count)) {
    throw InputError(fmt::format("'{}' is not a list of {} channels for each of {} heads", key, count, layer.kv_heads));
  }
  std::vector<int> channels;
  for (const Json& element : value) {
    const bool first = channels.size() % static_cast<size_t>(count) == 0;
    const int64_t min = first ? 0 : channels.back() + 1;
    channels.push_back(static_cast<int>(Integer(element, key.c_str(), min, layer.shape.head_dim - 1)));
  }
  return channels;
}

std::string QueryHash(const Json& object, const std::string& key) {
  std::string hash = Text(object, key.c_str());
  if (hash.size() != 22 || !hash.starts_with("xxh64-")) {
    throw InputError(fmt::format("'{}' is not a hash xxh64- of 16 digits", key));
  }
  return hash;
}

CacheLayout ReadLayout(const Json& root) {
  const int64_t page_size = Integer(Member(root, "page_size"), "page_size", 16, 128);
  const Json& entries = Member(root, "layers");
  if (!entries.is_array()) throw InputError("'layers' is not a list");
  std::vector<KvScheme> schemes;
  std::vector<LayerShape> shapes;
  std::vector<int> groups;
  for (const Json& entry : entries) {
    const Json& range = Member(entry, "layers");
    if (!range.is_array() || range.size() != 2) throw InputError("an entry's 'layers' is not [first, last]");
    const auto next = static_cast<int64_t>(schemes.size());
    if (Integer(range[0], "layers", 0, kMaxLayers - 1) != next) throw InputError("'layers' leaves a layer out");
    const int64_t last = Integer(range[1], "layers", next, kMaxLayers - 1);
    const KvScheme scheme = KvScheme::Parse(Text(entry, "scheme"));
    const bool is_recurrent = entry.contains("state_bytes");
    const LayerShape shape = {
        .kv_heads = is_recurrent ? 0 : static_cast<int>(Integer(Member(entry, "kv_heads"), "kv_heads", 1, kMaxKvHeads)),
        .head_dim = static_cast<int>(Integer(Member(entry, "head_dim"), "head_dim", kMinHeadDim, kMaxHeadDim)),
        .rope_dim = entry.contains("rope_dim")
                        ? static_cast<int>(Integer(entry.at("rope_dim"), "rope_dim", 2, kMaxRopeDim))
                        : 0,
        .state = {.others = is_recurrent ? Integer(entry.at("state_bytes"), "state_bytes", 1, kMaxStateBytes) / 4 : 0},
        .keys_only = entry.contains("keys_only"),
        .shared_kv = entry.contains("shared_kv"),
        .row_tokens = entry.contains("row_tokens")
                          ? static_cast<int>(Integer(entry.at("row_tokens"), "row_tokens", 2, kMaxRowTokens))
                          : 1};
    const int group =
        entry.contains("group") ? static_cast<int>(Integer(entry.at("group"), "group", 0, kMaxLayers - 1)) : 0;
    groups.insert(groups.end(), static_cast<size_t>(last - next + 1), group);
    schemes.insert(schemes.end(), static_cast<size_t>(last - next + 1), scheme);
    shapes.insert(shapes.end(), static_cast<size_t>(last - next + 1), shape);
  }
  CacheLayout layout = PlanCache(schemes, shapes, static_cast<int>(page_size), groups);
  // Same names but another encoding, of another version: refuse rather than misread.
  if (LayersJson(layout) != entries)
    throw InputError("its encodings are not those that this version has by these names");
  return layout;
}

std::vector<LayerScales> ReadScales(const Json& root, const CacheLayout& layout) {
  const Json& scales = Member(root, "scales");
  if (!scales.is_object()) throw InputError("'scales' is not an object");
  std::vector<LayerScales> layers(layout.layers.size());
  size_t used = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerScheme& layer = layout.layers[i];
    if (!layer.k.UsesScales() && !layer.v.UsesScales()) continue;
    ++used;
    const Json& json = Member(scales, std::to_string(i).c_str());
    const auto read = [&](const std::string& prefix, const Side& side, SideScales& out) {
      if (side.format->scaling.per_head) out.scale = Floats(json, prefix + "_scale", layer.kv_heads, true);
      if (side.mean) {
        out.mean = Floats(json, prefix + "_mean", int64_t{layer.kv_heads} * layer.shape.head_dim, false);
      }
      if (side.query) out.query_hash = QueryHash(json, fmt::format("{}_query", prefix));
      if (side.outliers != 0) out.outliers = Channels(json, prefix + "_outliers", layer, side.outliers);
    };
    read("k", layer.k, layers[i].k);
    read("v", layer.v, layers[i].v);
  }
  if (used != scales.size()) throw InputError("'scales' names layers without scales");
  if (used == 0) layers.clear();
  return layers;
}

}  // namespace

std::string PageHeaderToJson(const PageHeader& header) {
  Json json = {{"model", header.model},
               {"record", "quantized"},  // this and the group: no identity changes by what its pages' files say
               {"page_size", header.layout.page_size},
               {"layers", LayersJson(header.layout)},
               {"scales", ScalesJson(header)}};
  if (header.layout.groups.size() > 1) json["group"] = 0;
  // A model's identity may hold a path of any bytes; what is not UTF-8 is replaced rather than thrown.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

PageHeader PageHeaderFromJson(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) throw InputError("its header is not JSON");
  PageHeader header;
  header.model = Text(json, "model");
  if (const std::string record = Text(json, "record"); record != "quantized") {
    throw InputError(fmt::format("record '{}': must be quantized", Sanitize(record)));
  }
  header.layout = ReadLayout(json);
  if (header.layout.groups.size() > 1) Integer(Member(json, "group"), "group", 0, 0);
  header.scales = ReadScales(json, header.layout);
  return header;
}

}  // namespace kvanta::formats
