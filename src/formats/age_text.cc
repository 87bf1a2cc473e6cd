#include "formats/age_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/quote.h"
#include "formats/format.h"
#include "formats/names.h"
#include "formats/parse_text.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr std::string_view kFloorKey = "floor";

// Characters of the age at the start of `text`, digits or kFloorKey, if '=' follows; else 0.
size_t AgeLength(std::string_view text) noexcept {
  const size_t end = text.starts_with(kFloorKey) ? kFloorKey.size() : text.find_first_not_of("0123456789");
  return end < text.size() && text[end] == '=' ? end : 0;
}

// Takes "TOKENS=SCHEME" off the front: a part ends at a comma before another age and '='.
std::string_view TakePart(std::string_view& rest) noexcept {
  for (size_t comma = rest.find(','); comma != std::string_view::npos; comma = rest.find(',', comma + 1)) {
    if (!IsAgeText(Trim(rest.substr(comma + 1)))) continue;
    return Trim(std::exchange(rest, Trim(rest.substr(comma + 1))).substr(0, comma));
  }
  return std::exchange(rest, {});
}

[[noreturn]] void Refuse(std::string_view text, std::string_view why) {
  throw InputError(fmt::format("KV cache ages '{}': {}", Sanitize(text), why));
}

// The age of "TOKENS=SCHEME" or "floor=SCHEME", which takes `length` characters.
int64_t AgeOf(std::string_view text, std::string_view part, size_t length) {
  if (part.starts_with(kFloorKey)) return KvAge::kFloor;
  int64_t tokens = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + length, tokens);
  if (error != std::errc() || tokens > kMaxTokens) {
    Refuse(text, fmt::format("'{}': an age is at most {} tokens", Sanitize(part), kMaxTokens));
  }
  return tokens;
}

// Modifiers of a later level are those of the first one, which transforms the rows.
void CheckSide(const KvSide& first, const KvSide& later, char name, std::string_view text, std::string_view part) {
  if (later.mean || later.query || later.outliers != 0) {
    Refuse(text,
           fmt::format("'{}': +mean, +query and +outliers are of the first level, which every later one takes over",
                       Sanitize(part)));
  }
  if (later.hadamard != first.hadamard) {
    Refuse(text,
           fmt::format("'{}': {} is stored {} the Hadamard transform, but {} it in the first level; say {}hadamard "
                       "in one of them",
                       Sanitize(part), name, later.hadamard ? "with" : "without", first.hadamard ? "with" : "without",
                       first.hadamard ? "+" : "-"));
  }
}

}  // namespace

bool IsAgeText(std::string_view text) noexcept {
  return AgeLength(text) != 0;
}

KvScheme ParseAges(std::string_view text, bool mla) {
  KvScheme scheme;
  bool is_first = true;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view part = TakePart(rest);
    const size_t length = AgeLength(part);
    const int64_t tokens = AgeOf(text, part, length);
    const std::string_view level_text = Trim(part.substr(length + 1));
    if (IsAgeText(level_text)) Refuse(text, fmt::format("'{}' has two ages", Sanitize(part)));
    KvScheme level = KvScheme::Parse(level_text, mla);
    if (is_first) {
      if (tokens != 0) {
        Refuse(text, fmt::format("the first age is {}, must be 0: 0=int8,8192=int4", part.substr(0, length)));
      }
      scheme = std::move(level);
      is_first = false;
      continue;
    }
    if (!scheme.ages.empty() && scheme.HasFloor() != (tokens == KvAge::kFloor)) {
      Refuse(text, "ages and a floor do not go together; give one of them");
    }
    const int64_t before = scheme.ages.empty() ? 0 : scheme.ages.back().tokens;
    if (tokens <= before && tokens != KvAge::kFloor) {
      Refuse(text, fmt::format("the age {} must be above {}", tokens, before));
    }
    if (std::ssize(scheme.ages) == KvScheme::kMaxAges) {
      Refuse(text, fmt::format("there are at most {} levels", KvScheme::kMaxAges + 1));
    }
    CheckSide(scheme.k, level.k, 'K', text, part);
    CheckSide(scheme.v, level.v, 'V', text, part);
    if (level.exact == ExactPages::kTwo) {
      Refuse(text, fmt::format("'{}': +exact=2 is of the first level alone", Sanitize(part)));
    }
    scheme.boundary_layers = std::max(scheme.boundary_layers, level.boundary_layers);
    scheme.ages.push_back({.tokens = tokens, .k = level.k, .v = level.v, .sink_pages = level.sink_pages});
  }
  if (scheme.ages.empty()) Refuse(text, "there is no age after 0; write 0=int8,8192=int4");
  return scheme;
}

std::string LevelText(const KvAge& age) {
  const Format &k = Find(age.k.format), &v = Find(age.v.format);
  KvScheme level{.k = age.k, .v = age.v, .exact = std::max(k.exact, v.exact), .sink_pages = age.sink_pages};
  if (level.sink_pages != 0) level.exact = ExactPages::kOpen;
  if (&k == &v) level.boundary_layers = k.boundary_layers;
  return level.ToString();
}

std::string AgeText(const KvScheme& scheme) {
  KvScheme first = scheme;
  first.ages.clear();
  std::string text = "0=" + first.ToString();
  for (const KvAge& age : scheme.ages) {
    text += fmt::format(",{}={}", scheme.HasFloor() ? kFloorKey : fmt::to_string(age.tokens), LevelText(age));
  }
  return text;
}

}  // namespace kvanta::formats
