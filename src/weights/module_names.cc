#include "weights/module_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <vector>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::weights {
namespace {

constexpr int kMaxDepth = 16;  // nesting of groups
constexpr size_t kMaxLength = 4096;
constexpr int kMaxSteps = 1'000'000;  // nested quantifiers may need them

// The ends of matches, [length of the name + 1].
using Places = std::vector<bool>;

bool Any(const Places& places) {
  return std::ranges::find(places, true) != places.end();
}

Places Union(Places one, const Places& other) {
  for (size_t i = 0; i < one.size(); ++i) one[i] = one[i] || other[i];
  return one;
}

// Evaluates an expression while it reads it: each part takes the places at which it may begin, and gives those at which
// it then ends.
class Matcher {
 public:
  Matcher(std::string_view expression, std::string_view name) : expression_(expression), name_(name) {
    if (expression.size() > kMaxLength) Fail("it is too long");
  }

  bool Match() {
    Places begin(name_.size() + 1);
    begin[0] = true;
    const Places ends = Alternatives(begin);
    if (!AtEnd()) Fail("a ) without its (");
    return Any(ends);
  }

 private:
  [[noreturn]] void Fail(std::string_view why) const {
    throw InputError(
        fmt::format("regular expression {}, character {}: {}; groups, |, [...], *, +, ?, \\d, \\w, \\s and "
                    "lookahead are supported",
                    Quote(std::string(expression_.substr(0, 200))), at_ + 1, why));
  }

  bool AtEnd() const { return at_ == expression_.size(); }
  bool Take(std::string_view text) {
    if (!expression_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  char Next() {
    if (AtEnd()) Fail("it is not complete");
    return expression_[at_++];
  }

  Places Alternatives(const Places& from) {
    if (++depth_ > kMaxDepth) Fail("groups are nested too deeply");
    Places ends = Sequence(from);
    while (Take("|")) ends = Union(std::move(ends), Sequence(from));
    --depth_;
    return ends;
  }

  Places Sequence(Places from) {
    while (!AtEnd() && expression_[at_] != '|' && expression_[at_] != ')') from = Quantified(from);
    return from;
  }

  Places Quantified(const Places& from) {
    const size_t begin = at_;
    Places ends = Part(from);
    const char quantifier = AtEnd() ? '\0' : expression_[at_];
    if (quantifier == '{') Fail("counted repetition is not supported");
    if (quantifier != '*' && quantifier != '+' && quantifier != '?') return ends;
    if (quantifier != '?') {
      Places fresh = ends;
      while (Any(fresh)) {
        at_ = begin;
        fresh = Part(fresh);
        for (size_t i = 0; i < fresh.size(); ++i) fresh[i] = fresh[i] && !ends[i];
        ends = Union(std::move(ends), fresh);
      }
    }
    ++at_;
    Take("?");  // lazy: the same names match
    if (!AtEnd() && std::string_view("*+?{").find(expression_[at_]) != std::string_view::npos) {
      Fail("a quantifier after another");
    }
    return quantifier == '+' ? ends : Union(std::move(ends), from);
  }

  Places Part(const Places& from) {
    const char c = Next();
    switch (c) {
      case '(':
        return Group(from);
      case '[':
        return Class(from);
      case '.':
        return Step(from, [](char) { return true; });
      case '^':
        return At(from, 0);
      case '$':
        return At(from, name_.size());
      case '\\': {
        const char escaped = Next();
        return Step(from, [&](char each) { return IsEscaped(escaped, each); });
      }
      case '*':
      case '+':
      case '?':
      case '{':
        --at_;
        Fail("a quantifier of nothing");
      default:
        return Step(from, [c](char each) { return each == c; });
    }
  }

  Places Group(const Places& from) {
    const bool positive = Take("?=");
    const bool looks_ahead = positive || Take("?!");
    if (!looks_ahead && !Take("?:") && Take("?")) Fail("this kind of group is not supported");
    if (looks_ahead && in_lookahead_) Fail("nested lookahead is not supported");
    Places ends(from.size());
    if (looks_ahead) {
      in_lookahead_ = true;
      const size_t begin = at_;
      for (size_t i = 0; i < from.size(); ++i) {
        Places one(from.size());
        one[i] = from[i];
        at_ = begin;
        const bool found = Any(Alternatives(one));
        ends[i] = from[i] && found == positive;
      }
      in_lookahead_ = false;
    } else {
      ends = Alternatives(from);
    }
    if (!Take(")")) Fail("a ( without its )");
    return ends;
  }

  Places Class(const Places& from) {
    const bool negated = Take("^");
    std::vector<bool> in_class(256);
    for (bool first = true; first || !Take("]"); first = false) {
      const std::optional<char> low = AddToClass(in_class);
      if (!low || !expression_.substr(at_).starts_with("-") || expression_.substr(at_).starts_with("-]")) continue;
      ++at_;
      const std::optional<char> high = AddToClass(in_class);
      if (!high || Byte(*high) < Byte(*low)) Fail("a range whose end is below its start");
      for (size_t i = Byte(*low); i <= Byte(*high); ++i) in_class[i] = true;
    }
    return Step(from, [&](char each) { return in_class[Byte(each)] != negated; });
  }

  // Adds a character, which it returns, or the characters of an escape such as \d.
  std::optional<char> AddToClass(std::vector<bool>& in_class) {
    const char c = Next();
    if (c != '\\') {
      in_class[Byte(c)] = true;
      return c;
    }
    const char escaped = Next();
    for (size_t i = 0; i < in_class.size(); ++i) {
      if (IsEscaped(escaped, static_cast<char>(i))) in_class[i] = true;
    }
    return std::ispunct(Byte(escaped)) != 0 ? std::optional(escaped) : std::nullopt;
  }

  bool IsEscaped(char escaped, char c) const {
    if (std::ispunct(Byte(escaped)) != 0) return c == escaped;
    if (escaped == 'd') return std::isdigit(Byte(c)) != 0;
    if (escaped == 'w') return std::isalnum(Byte(c)) != 0 || c == '_';
    if (escaped == 's') return std::isspace(Byte(c)) != 0;
    Fail("an escape that is not supported");
  }

  template <class Predicate>
  Places Step(const Places& from, Predicate takes) {
    if (++steps_ > kMaxSteps) Fail("it takes too long");
    Places to(from.size());
    for (size_t i = 0; i < name_.size(); ++i) to[i + 1] = takes(name_[i]) && from[i];
    if (name_.empty()) takes('a');  // checks the escape
    return to;
  }

  static Places At(const Places& from, size_t place) {
    Places to(from.size());
    to[place] = from[place];
    return to;
  }

  static size_t Byte(char c) { return static_cast<unsigned char>(c); }

  const std::string_view expression_, name_;
  size_t at_ = 0;
  int depth_ = 0, steps_ = 0;
  bool in_lookahead_ = false;
};

}  // namespace

bool MatchesExpression(std::string_view expression, std::string_view name) {
  return Matcher(expression, name).Match();
}

std::optional<int64_t> LayerOf(std::string_view tensor) {
  constexpr std::string_view kMark = "layers.";
  size_t at = tensor.find(kMark);
  if (at == std::string_view::npos || (at != 0 && tensor[at - 1] != '.')) return std::nullopt;
  at += kMark.size();
  int64_t layer = 0;
  size_t digits = 0;
  for (; at < tensor.size() && tensor[at] >= '0' && tensor[at] <= '9' && digits < 9; ++at, ++digits) {
    layer = layer * 10 + (tensor[at] - '0');
  }
  if (digits == 0 || at >= tensor.size() || tensor[at] != '.') return std::nullopt;
  return layer;
}

}  // namespace kvanta::weights
