// The text of schemes: presets, the explicit syntax, modifiers, per-layer overrides. Grammar in docs/formats.md.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/quote.h"
#include "formats/age_text.h"
#include "formats/format.h"
#include "formats/names.h"
#include "formats/parse_text.h"
#include "kvanta/error.h"
#include "kvanta/kv_scheme.h"

namespace kvanta {
namespace {

using formats::Find;
using formats::Format;
using formats::TakeUntil;
using formats::Trim;

constexpr std::string_view kModifiers =
    "+hadamard, -hadamard, +mean, -mean, +query, -query, +outliers=N, +exact=none, +exact=open, +exact=2, +sink=N, "
    "+edges=N";

// One name with its modifiers, before defaults. Absent: the format's default.
struct Term {
  const Format* format = nullptr;
  std::optional<bool> hadamard;
  std::optional<bool> mean;
  std::optional<bool> query;
  std::optional<int> outliers;
};
struct Exactness {
  std::optional<ExactPages> pages;
  std::optional<int> sink_pages;
  std::optional<int> boundary_layers;
};

template <class T>
void SetOnce(std::optional<T>& slot, T value, std::string_view what, std::string_view text) {
  if (slot) throw InputError(fmt::format("KV cache scheme '{}': {} is given twice", Sanitize(text), what));
  slot = value;
}

// The N of "sink=N".
int ParseCount(std::string_view modifier, int max, std::string_view text) {
  const std::string_view digits = modifier.substr(modifier.find('=') + 1);
  int count = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
  if (error != std::errc() || end != digits.data() + digits.size() || count < 0 || count > max) {
    throw InputError(fmt::format("KV cache scheme '{}': '+{}' must be a number from 0 to {}", Sanitize(text),
                                 Sanitize(modifier), max));
  }
  return count;
}

void ApplyModifier(char sign, std::string_view modifier, std::string_view text, Term& term, Exactness& exact) {
  if (modifier == "hadamard") return SetOnce(term.hadamard, sign == '+', modifier, text);
  if (modifier == "query") return SetOnce(term.query, sign == '+', modifier, text);
  if (modifier == "mean") return SetOnce(term.mean, sign == '+', modifier, text);
  if (sign == '+') {
    if (modifier.starts_with("outliers=")) {
      const int count = ParseCount(modifier, KvScheme::kMaxOutliers, text);
      if (count % 2 != 0) {  // channels rotate in pairs, and the cache stores pairs
        throw InputError(fmt::format("KV cache scheme '{}': +outliers={} must be even", Sanitize(text), count));
      }
      return SetOnce(term.outliers, count, "outliers", text);
    }
    if (modifier == "exact=none") return SetOnce(exact.pages, ExactPages::kNone, "exact", text);
    if (modifier == "exact=open") return SetOnce(exact.pages, ExactPages::kOpen, "exact", text);
    if (modifier == "exact=2") return SetOnce(exact.pages, ExactPages::kTwo, "exact", text);
    if (modifier.starts_with("sink=")) {
      return SetOnce(exact.sink_pages, ParseCount(modifier, KvScheme::kMaxSinkPages, text), "sink", text);
    }
    if (modifier.starts_with("edges=")) {
      return SetOnce(exact.boundary_layers, ParseCount(modifier, KvScheme::kMaxBoundaryLayers, text), "edges", text);
    }
  }
  throw InputError(fmt::format("KV cache scheme '{}': unknown modifier '{}{}'; modifiers are {}", Sanitize(text), sign,
                               Sanitize(modifier), kModifiers));
}

// Only a side's "k=" can come before the first comma or modifier; "exact=open" comes after one.
bool IsExplicit(std::string_view text) {
  const size_t equals = text.find('=');
  return equals != std::string_view::npos && equals < text.find_first_of(",+-");
}

// NAME[+modifier|-modifier]... mla: as for KvScheme::Parse.
Term ParseTerm(std::string_view term_text, std::string_view text, bool mla, Exactness& exact) {
  const size_t name_end = std::min(term_text.find_first_of("+-"), term_text.size());
  Term term;
  const std::string_view name = Trim(term_text.substr(0, name_end));
  const formats::CompatName* compat = formats::FindCompatName(name);
  const bool is_format = compat != nullptr && !compat->format.empty() && !IsExplicit(compat->format);
  term.format = &Find(is_format ? compat->format : name);
  if (mla && !term.format->latent_format.empty()) term.format = &Find(term.format->latent_format);
  for (size_t begin = name_end; begin < term_text.size();) {
    const size_t end = std::min(term_text.find_first_of("+-", begin + 1), term_text.size());
    ApplyModifier(term_text[begin], Trim(term_text.substr(begin + 1, end - begin - 1)), text, term, exact);
    begin = end;
  }
  return term;
}

KvSide Resolve(const Term& term, bool is_key) {
  return {.format = std::string(term.format->name),
          .hadamard = term.hadamard.value_or(formats::OnSide(*term.format, is_key).hadamard),
          .mean = term.mean.value_or(false),
          .query = term.query.value_or(is_key && formats::IsAllocated(term.format->code)),
          .outliers = term.outliers.value_or(0)};
}

// Exact pages belong to the scheme, not to a side: the default is that of the side that needs more.
ExactPages DefaultExact(const Format& k, const Format& v) {
  return std::max(k.exact, v.exact);
}
// +query needs an exact first page.
int DefaultSink(const Format& k, const Format& v, ExactPages exact, bool query) {
  return exact == ExactPages::kNone ? 0 : std::max({k.sink_pages, v.sink_pages, query ? 1 : 0});
}
// Only a name for both sides is a preset of the whole model.
int DefaultBoundaryLayers(const Format& k, const Format& v) {
  return &k == &v ? k.boundary_layers : 0;
}

KvScheme Combine(const Term& k, const Term& v, const Exactness& exact, std::string_view text) {
  KvScheme scheme{.k = Resolve(k, true), .v = Resolve(v, false)};
  scheme.exact = exact.pages.value_or(DefaultExact(*k.format, *v.format));
  scheme.sink_pages = exact.sink_pages.value_or(DefaultSink(*k.format, *v.format, scheme.exact, scheme.k.query));
  scheme.boundary_layers = exact.boundary_layers.value_or(DefaultBoundaryLayers(*k.format, *v.format));
  if (scheme.sink_pages > 0 && scheme.exact == ExactPages::kNone) {
    throw InputError(fmt::format("KV cache scheme '{}': +sink={} keeps exact pages, so it needs exact=open or exact=2",
                                 Sanitize(text), scheme.sink_pages));
  }
  return scheme;
}

KvScheme ParseExplicit(std::string_view text, bool mla) {
  std::optional<Term> k;
  std::optional<Term> v;
  Exactness exact;
  std::string_view rest = text;
  for (bool more = true; more;) {
    more = rest.find(',') != std::string_view::npos;
    std::string_view part = TakeUntil(rest, ',');
    const std::string_view side = Trim(TakeUntil(part, '='));
    if (side != "k" && side != "v") {
      throw InputError(fmt::format("KV cache scheme '{}': side '{}' is neither k nor v; write k=NAME,v=NAME",
                                   Sanitize(text), Sanitize(side)));
    }
    SetOnce(side == "k" ? k : v, ParseTerm(part, text, mla, exact), side, text);
  }
  if (!k || !v) {
    throw InputError(fmt::format("KV cache scheme '{}': side {} is missing; name both, as in k=int8,v=int4",
                                 Sanitize(text), k ? "v" : "k"));
  }
  if (v->mean) throw InputError(fmt::format("KV cache scheme '{}': only K takes +mean or -mean", Sanitize(text)));
  if (v->query) throw InputError(fmt::format("KV cache scheme '{}': only K takes +query or -query", Sanitize(text)));
  if (v->outliers) throw InputError(fmt::format("KV cache scheme '{}': only K takes +outliers", Sanitize(text)));
  return Combine(*k, *v, exact, text);
}

std::string SideText(const KvSide& side, bool is_key) {
  const Format& format = formats::OnSide(Find(side.format), is_key);
  std::string text(side.format);
  if (side.hadamard != format.hadamard) text += side.hadamard ? "+hadamard" : "-hadamard";
  if (side.mean) text += "+mean";
  if (const bool by_default = is_key && formats::IsAllocated(format.code); side.query != by_default) {
    text += side.query ? "+query" : "-query";
  }
  if (side.outliers != 0) text += fmt::format("+outliers={}", side.outliers);
  return text;
}

}  // namespace

KvScheme KvScheme::Parse(std::string_view text, bool mla) {
  text = Trim(text);
  if (formats::IsAgeText(text)) return formats::ParseAges(text, mla);
  if (const formats::CompatName* compat = formats::FindCompatName(text); compat && IsExplicit(compat->format)) {
    text = compat->format;
  }
  if (IsExplicit(text)) return ParseExplicit(text, mla);
  if (text.find(',') != std::string_view::npos) {
    throw InputError(fmt::format("KV cache scheme '{}': K and V are named apart as in k=int8,v=int4", Sanitize(text)));
  }
  Exactness exact;
  const Term k = ParseTerm(text, text, mla, exact);
  Term v = k;
  v.mean.reset();  // key means, query-aware matrices and outlier channels are K's alone
  v.query.reset();
  v.outliers.reset();
  return Combine(k, v, exact, text);
}

std::string KvScheme::ToString() const {
  if (!ages.empty()) return formats::AgeText(*this);
  const Format& k_format = Find(k.format);
  const Format& v_format = Find(v.format);
  // One name sets a modifier on both sides: it suffices if both sides have their defaults, or the same other value.
  const auto is_default = [](const Format& format, const KvSide& side, bool is_key) {
    return side.hadamard == formats::OnSide(format, is_key).hadamard;
  };
  const bool both_default = is_default(k_format, k, true) && is_default(v_format, v, false);
  const bool one_name = k_format.name == v_format.name && !v.mean && !v.query && v.outliers == 0 &&
                        (both_default || k.hadamard == v.hadamard);
  std::string text = one_name && (both_default || !is_default(k_format, k, true))
                         ? SideText(k, true)
                         : "k=" + SideText(k, true) + ",v=" + SideText(v, false);

  if (exact != DefaultExact(k_format, v_format)) {
    text += exact == ExactPages::kNone ? "+exact=none" : exact == ExactPages::kOpen ? "+exact=open" : "+exact=2";
  }
  if (sink_pages != DefaultSink(k_format, v_format, exact, k.query)) text += fmt::format("+sink={}", sink_pages);
  if (boundary_layers != DefaultBoundaryLayers(k_format, v_format)) text += fmt::format("+edges={}", boundary_layers);
  return text;
}

std::vector<std::string> FormatNames() {
  std::vector<std::string> names;
  for (const Format& format : formats::All()) names.emplace_back(format.name);
  return names;
}

}  // namespace kvanta
