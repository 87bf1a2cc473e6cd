// Sizes of a JSON text, found without Python's interpreter: the server bounds the time of json.loads by them.
#include <nanobind/stl/tuple.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <tuple>

#include "bindings.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

enum Kind : uint8_t { kContainer, kField, kComma, kDigit, kFraction, kQuote, kOther, kKinds };

constexpr std::array<Kind, 256> Kinds() {
  std::array<Kind, 256> kinds{};
  kinds.fill(kOther);
  for (const unsigned char digit : std::string_view("0123456789")) kinds[digit] = kDigit;
  for (const unsigned char sign : std::string_view(".eE")) kinds[sign] = kFraction;
  kinds['['] = kinds['{'] = kContainer;
  kinds[':'] = kField;
  kinds[','] = kComma;
  kinds['"'] = kQuote;
  return kinds;
}

// Position after the string that begins before `at`.
size_t StringEnd(std::string_view text, size_t at) {
  for (; at < text.size(); ++at) {
    at = text.find_first_of("\"\\", at);
    if (at == std::string_view::npos) break;
    if (text[at] == '"') return at + 1;
    ++at;  // what is escaped
  }
  return text.size();
}

constexpr int kShortNumber = 19;  // digits that are free: an integer of 64 bits

// Lists and objects, fields, commas, digits of long numbers, and signs of fractions, all outside of strings.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> CountJson(std::string_view text) {
  static constexpr std::array<Kind, 256> kKindOf = Kinds();
  std::array<int64_t, kKinds> counts{};
  Kind before = kOther;
  int64_t digits = 0;  // digits of this number so far
  for (size_t at = 0; at < text.size();) {
    const Kind kind = kKindOf[static_cast<unsigned char>(text[at++])];
    if (kind == kFraction && before != kDigit) continue;  // true, false
    digits = kind == kDigit ? digits + 1 : 0;
    if (kind != kDigit || digits > kShortNumber) ++counts[kind];
    if (kind == kQuote) at = StringEnd(text, at);
    before = kind;
  }
  return {counts[kContainer], counts[kField], counts[kComma], counts[kDigit], counts[kFraction]};
}

}  // namespace

void BindJsonCounts(nb::module_& module) {
  module.def(
      "count_json",
      [](const nb::bytes& text) {
        const std::string_view view(text.c_str(), text.size());
        const nb::gil_scoped_release release;
        return CountJson(view);
      },
      nb::arg("text"),
      "Lists and objects, fields, commas, digits after the 19th of a number, and signs of fractions (. e E) outside "
      "strings. Other threads run meanwhile. The text may be anything.");
}

}  // namespace kvanta::python
