// Per-layer overrides: "0,1,-1=bf16;2-5=int8".
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/quote.h"
#include "formats/parse_text.h"
#include "kvanta/error.h"
#include "kvanta/kv_scheme.h"

namespace kvanta {
namespace {

using formats::TakeUntil;

// "A" or "A-B", either end counted from the last layer if negative.
struct LayerRange {
  int first;
  int last;
};

int ParseIndex(std::string_view& text, std::string_view whole, int num_layers) {
  int index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc{}) {
    throw InputError(fmt::format("layers '{}': expected a layer number at '{}', as in 0,1,-1=bf16;2-5=int8",
                                 Sanitize(whole), Sanitize(text)));
  }
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  if (index < -num_layers || index >= num_layers) {
    throw InputError(fmt::format("layers '{}': layer {} is out of range, the model has {} (0 to {}, or -1 to -{})",
                                 Sanitize(whole), index, num_layers, num_layers - 1, num_layers));
  }
  return index < 0 ? index + num_layers : index;
}

void SkipBlanks(std::string_view& text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
}

// Takes one range off the front of `text`.
LayerRange TakeRange(std::string_view& text, std::string_view whole, int num_layers) {
  SkipBlanks(text);
  LayerRange range{};
  range.first = ParseIndex(text, whole, num_layers);
  range.last = range.first;
  SkipBlanks(text);
  if (!text.empty() && text.front() == '-') {
    text.remove_prefix(1);
    range.last = ParseIndex(text, whole, num_layers);
    SkipBlanks(text);
  }
  if (range.last < range.first) {
    throw InputError(fmt::format("layers '{}': the range {}-{} is empty", Sanitize(whole), range.first, range.last));
  }
  return range;
}

}  // namespace

std::vector<KvScheme> ParseLayerSchemes(const KvScheme& base, std::string_view per_layer, int num_layers,
                                        const std::vector<int>& attention_layers, bool mla) {
  KvScheme of_layer = base;
  of_layer.boundary_layers = 0;
  std::vector<KvScheme> schemes(static_cast<size_t>(num_layers), of_layer);
  const int count = attention_layers.empty() ? num_layers : static_cast<int>(attention_layers.size());
  const auto attention_layer = [&](int i) {
    return static_cast<size_t>(attention_layers.empty() ? i : attention_layers[static_cast<size_t>(i)]);
  };
  for (int i = 0; i < std::min(base.boundary_layers, count); ++i) {
    schemes[attention_layer(i)] = schemes[attention_layer(count - 1 - i)] = KvScheme::Parse("bf16");
  }
  return OverrideLayerSchemes(std::move(schemes), per_layer, mla);
}

std::vector<KvScheme> OverrideLayerSchemes(std::vector<KvScheme> schemes, std::string_view per_layer, bool mla) {
  const auto num_layers = static_cast<int>(schemes.size());
  std::vector<bool> named(schemes.size(), false);
  std::string_view rest = per_layer;
  while (!rest.empty()) {
    const std::string_view entry = TakeUntil(rest, ';');
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) {
      throw InputError(fmt::format("layers '{}': '{}' has no '=', write LAYERS=SCHEME as in 0,1,-1=bf16;2-5=int8",
                                   Sanitize(per_layer), Sanitize(entry)));
    }
    KvScheme scheme = KvScheme::Parse(entry.substr(equals + 1), mla);
    scheme.boundary_layers = 0;  // the layers are named
    std::string_view layers = entry.substr(0, equals);
    do {
      const LayerRange range = TakeRange(layers, per_layer, num_layers);
      for (int layer = range.first; layer <= range.last; ++layer) {
        const auto i = static_cast<size_t>(layer);
        if (named[i]) throw InputError(fmt::format("layers '{}': layer {} is named twice", Sanitize(per_layer), layer));
        named[i] = true;
        schemes[i] = scheme;
      }
      if (layers.empty()) break;
      if (layers.front() != ',') {
        throw InputError(
            fmt::format("layers '{}': expected ',' or '=' at '{}'", Sanitize(per_layer), Sanitize(layers)));
      }
      layers.remove_prefix(1);
    } while (true);
  }
  return schemes;
}

}  // namespace kvanta
