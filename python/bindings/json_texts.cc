// JSON texts of requests, read without Python's interpreter: their sizes, by which the server bounds the time of
// json.loads, and halves of characters.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
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

constexpr size_t kEscape = 6;  // characters of \u and four hexadecimal digits
constexpr unsigned kHighSurrogate = 0xd800, kLowSurrogate = 0xdc00, kLastSurrogate = 0xdfff;
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

// The code unit of an escape such as \ud83d at `at`; none: something else stands there.
std::optional<unsigned> EscapedUnit(std::string_view text, size_t at) {
  if (text.size() < at + kEscape || text[at] != '\\' || text[at + 1] != 'u') return std::nullopt;
  unsigned unit = 0;
  const char* const last = text.data() + at + kEscape;
  const auto [end, error] = std::from_chars(text.data() + at + 2, last, unit, 16);
  return error == std::errc() && end == last ? std::optional(unit) : std::nullopt;
}

// The text with U+FFFD in place of halves of characters of two code units, which a client has cut: as escapes, and in
// UTF-8, where they are not allowed. The length stays. None if there is no such half.
std::optional<std::string> WithoutLoneSurrogates(std::string_view text) {
  std::optional<std::string> result;
  const auto replace = [&](size_t at, std::string_view with) {
    if (!result) result.emplace(text);
    result->replace(at, with.size(), with);
  };
  for (size_t at = text.find_first_of("\\\xed"); at < text.size(); at = text.find_first_of("\\\xed", at)) {
    if (text[at] != '\\') {
      const bool is_surrogate = at + 2 < text.size() && static_cast<unsigned char>(text[at + 1]) >= 0xa0;
      if (is_surrogate) replace(at, "\xef\xbf\xbd");
      at += is_surrogate ? 3 : 1;
      continue;
    }
    const std::optional<unsigned> unit = EscapedUnit(text, at);
    if (!unit || *unit < kHighSurrogate || *unit > kLastSurrogate) {
      at += 2;
      continue;
    }
    const std::optional<unsigned> next = EscapedUnit(text, at + kEscape);
    const bool is_pair = *unit < kLowSurrogate && next && *next >= kLowSurrogate && *next <= kLastSurrogate;
    if (!is_pair) replace(at, "\\ufffd");
    at += is_pair ? 2 * kEscape : kEscape;
  }
  return result;
}

}  // namespace

void BindJsonTexts(nb::module_& module) {
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
  module.def(
      "without_lone_surrogates",
      [](const nb::bytes& body) -> std::optional<nb::bytes> {
        const std::optional<std::string> text = WithoutLoneSurrogates({body.c_str(), body.size()});
        return text ? std::optional(nb::bytes(text->data(), text->size())) : std::nullopt;
      },
      nb::arg("body"),
      "A JSON text with U+FFFD in place of halves of surrogate pairs, as escapes or in UTF-8; None if it has none.");
}

}  // namespace kvanta::python
