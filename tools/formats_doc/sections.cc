#include "sections.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "formats/cell_codec.h"
#include "formats/names.h"
#include "formats/trellis_levels.h"

namespace kvanta::formats_doc {
namespace {

using formats::CellShape;
using formats::ElementType;
using formats::Format;
using formats::SideKind;

constexpr CellShape kShape = {.tokens = 64, .head_dim = 128};

// K and V, of which most names mean the same.
std::vector<const Format*> Sides(const Format& format) {
  if (format.value_side == nullptr) return {&format};
  return {&format, format.value_side};
}

double Bits(const Format& format) {
  double bits = 0;
  for (const bool is_key : {true, false}) {
    const int64_t bytes = formats::PlanCell(formats::OnSide(format, is_key), kShape).bytes;
    bits += static_cast<double>(bytes) * 8 / (kShape.tokens * kShape.head_dim) / 2;
  }
  return bits;
}

// N(0, 1) by splitmix64 and Box-Muller: the same everywhere, whatever the standard library.
std::vector<float> Normal(size_t n) {
  uint64_t state = 1;
  const auto uniform = [&state] {
    state += 0x9e3779b97f4a7c15U;
    uint64_t z = state;
    z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
    return (static_cast<double>((z ^ (z >> 31U)) >> 11U) + 0.5) * 0x1p-53;
  };
  std::vector<float> x(n);
  for (float& value : x) {
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    value = static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * uniform()));
  }
  return x;
}

// The scheme that formats are shown by: without calibrations.
std::string Uncalibrated(const Format& format) {
  return fmt::format("{}{}", format.name, formats::IsAllocated(format.code) ? "-query" : "");
}

// Mean squared error over mean square, of rows that went through the format's preset.
double Distortion(const Format& format, SideKind kind) {
  constexpr CellShape kRows = {.tokens = 4096, .head_dim = 128};
  static const std::vector<float> x = Normal(size_t{kRows.tokens} * kRows.head_dim);
  const KvScheme scheme = KvScheme::Parse(Uncalibrated(format));
  const auto bytes = EncodeCell(scheme, kind, x, kRows);
  const auto decoded = DecodeCell(scheme, kind, bytes, kRows);
  double error = 0;
  double square = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += (double{x[i]} - decoded[i]) * (double{x[i]} - decoded[i]);
    square += double{x[i]} * x[i];
  }
  return error / square;
}

std::string Hex(const uint8_t* bytes, size_t n) {
  std::string text;
  for (size_t i = 0; i < n; ++i) text += fmt::format("{}{:02x}", i == 0 ? "" : " ", bytes[i]);
  return text;
}

std::string CellDrawing(const Format& format) {
  const formats::CellSections sections = PlanCell(format, kShape);
  std::string text;
  const auto line = [&text](int64_t offset, std::string_view name, const std::string& shape) {
    text += fmt::format("    {:>6}  {:<14} {}\n", offset, name, shape);
  };
  line(sections.codes, "codes", fmt::format("{} tokens x {} bytes", kShape.tokens, sections.row_bytes));
  const formats::Scaling& scaling = format.scaling;
  const auto per_row = [&](int64_t offset, std::string_view name, int blocks, int bytes) {
    const std::string of_block = blocks == 0 ? "" : fmt::format(" x {} blocks", blocks);
    line(offset, name, fmt::format("{} tokens{} x {} bytes", kShape.tokens, of_block, bytes));
  };
  if (sections.blocks != 0) per_row(sections.block_scales, "block scales", sections.blocks, Bytes(scaling.block));
  if (scaling.block_offset) per_row(sections.block_offsets, "block zeros", sections.blocks, 2);
  if (scaling.token != formats::ScaleType::kNone) {
    per_row(sections.token_scales, "token scales", 0, Bytes(scaling.token));
  }
  if (scaling.token_offset) per_row(sections.token_offsets, "token zeros", 0, 2);
  if (scaling.channel_bits) {
    line(sections.channel_scales, "channel scales",
         fmt::format("{} tiles x {} bytes", kShape.tokens / scaling.token_group,
                     formats::GroupScaleBytes(scaling, kShape.head_dim)));
  } else if (scaling.token_group != 0) {
    const std::string shape =
        fmt::format("{} tiles x {} channels x 2 bytes", kShape.tokens / scaling.token_group, kShape.head_dim);
    line(sections.channel_scales, "channel scales", shape);
    line(sections.channel_offsets, "channel zeros", shape);
  }
  return text + fmt::format("    {:>6}  end\n", sections.bytes);
}

// One text where both sides agree, else "K: ..., V: ...".
template <class TextOf>
std::string OfSides(const Format& format, TextOf text_of) {
  const std::string k = text_of(format, SideKind::kK), v = text_of(OnSide(format, false), SideKind::kV);
  return k == v ? k : fmt::format("K: {}, V: {}", k, v);
}

}  // namespace

std::string FormatTable() {
  std::string text =
      "| name | aliases | bits | scale | step | hadamard | exact | sink | distortion |\n"
      "|---|---|---|---|---|---|---|---|---|\n";
  for (const Format& format : formats::All()) {
    const std::string scaling =
        OfSides(format, [](const Format& side, SideKind) { return DescribeScaling(side.scaling); });
    const std::string multiple = OfSides(format, [](const Format& side, SideKind) {
      const int channels = std::max(side.scaling.channels, formats::CodeChannels(side.code));
      return fmt::format("{}{}", channels, side.scaling.allow_partial_block ? " or less" : "");
    });
    const std::string hadamard =
        OfSides(format, [](const Format& side, SideKind) { return std::string(side.hadamard ? "yes" : "no"); });
    const std::string distortion = OfSides(format, [&format](const Format&, SideKind kind) {
      const double value = Distortion(format, kind);
      return value == 0 ? "0" : fmt::format("{:.2e}", value);
    });
    text += fmt::format("| `{}` | {} | {} | {} | {} | {} | {} | {} | {} |\n", format.name,
                        fmt::join(format.aliases, ", "), Bits(format), scaling, multiple, hadamard,
                        format.exact == ExactPages::kNone ? "none" : "open", format.sink_pages, distortion);
  }
  return text;
}

std::string FormatDetails() {
  std::string text;
  for (const Format& format : formats::All()) {
    text += fmt::format("### `{}`\n{}.\n\n", format.name, format.summary);
    for (const Format* side : Sides(format)) {
      const char* label = format.value_side == nullptr ? "" : side == &format ? " of K" : " of V";
      text += fmt::format("    element{}   {}\n", label, Info(side->code).layout);
    }
    text += fmt::format("    encode    {}\n\n", format.rule);
    for (const Format* side : Sides(format)) {
      const char* label = format.value_side == nullptr ? "A" : side == &format ? "A K" : "A V";
      text += fmt::format("{} cell of {} tokens at head_dim {}:\n\n{}\n", label, kShape.tokens, kShape.head_dim,
                          CellDrawing(*side));
    }
  }
  text.pop_back();
  return text;
}

std::string LevelTable() {
  std::string text = "| code | bit planes | levels by field | unit |\n|---|---|---|---|\n";
  for (int i = 0; i < formats::kElementTypes; ++i) {
    const auto code = static_cast<ElementType>(i);
    const formats::ElementTypeInfo info = formats::Info(code);
    if (info.low_bits >= 8 || formats::IsTrellis(code) || formats::IsAllocated(code)) continue;
    const formats::CodeLevels table = formats::Levels(code);
    const int count = 1 << formats::CodeBits(code);
    std::vector<int> levels(table.level, table.level + count);
    const bool consecutive =
        levels.back() - levels.front() == count - 1 && std::is_sorted(levels.begin(), levels.end());
    const std::string listed = !IsInteger(code) ? "floats by their bits"
                               : consecutive    ? fmt::format("{} .. {}", levels.front(), levels.back())
                                                : fmt::format("{}", fmt::join(levels, ", "));
    // A Lloyd-Max unit is its largest value, of four digits, over 127.
    const std::string unit = table.unit == 1        ? "1"
                             : levels.back() == 127 ? fmt::format("{:.4f} / 127", table.unit * 127)
                                                    : fmt::format("{}", table.unit);
    text += fmt::format(
        "| `{}` | {} | {} | {} |\n", info.name,
        info.high_bits == 0 ? fmt::format("{}", info.low_bits) : fmt::format("{} + {}", info.low_bits, info.high_bits),
        listed, unit);
  }
  return text;
}

std::string TrellisLevels() {
  std::string text;
  for (int bits = formats::kMinTrellisBits; bits <= 4; ++bits) {
    const formats::TrellisLevelTable& table = formats::kTrellisLevels[bits - formats::kMinTrellisBits];
    text += fmt::format("    {} bits, rms {}:\n", bits, table.rms);
    for (int first = 0; first < 256; first += 16) {
      text += fmt::format("      {:>4}\n", fmt::join(table.levels + first, table.levels + first + 16, " "));
    }
  }
  return text;
}

std::string SchemeTable() {
  std::string text = "| text | means | exact | sink |\n|---|---|---|---|\n";
  for (const char* typed :
       {"int8", "int4", "fp8", "int4+exact=none", "int4+sink=0", "int8-hadamard", "int8+exact=open", "int4+exact=2",
        "k=int8,v=int4", "k=int4+mean,v=int4", "int4+outliers=4", "int4+query", "k=bf16,v=int8+exact=none"}) {
    const KvScheme scheme = KvScheme::Parse(typed);
    const auto side = [](const KvSide& s) {
      return fmt::format("{}{}{}{}", s.format,
                         s.query      ? " + query"
                         : s.hadamard ? " + hadamard"
                                      : "",
                         s.mean ? " + mean" : "", s.outliers != 0 ? fmt::format(" + {} outliers", s.outliers) : "");
    };
    text += fmt::format("| `{}` | K {}, V {} | {} | {} |\n", typed, side(scheme.k), side(scheme.v),
                        scheme.exact == ExactPages::kNone   ? "none"
                        : scheme.exact == ExactPages::kOpen ? "open"
                                                            : "2",
                        scheme.sink_pages);
  }
  return text;
}

std::string CompatTable() {
  // Names of one origin with the same answer share a row.
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  for (const formats::CompatName& compat : formats::CompatNames()) {
    const std::string answer = compat.format.empty() ? fmt::format("{} | refused: {}", compat.origin, compat.reason)
                                                     : fmt::format("{} | `{}`", compat.origin, compat.format);
    auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& other) { return other.first == answer; });
    if (row == rows.end()) row = rows.insert(rows.end(), {answer, {}});
    row->second.push_back(fmt::format("`{}`", compat.name));
  }
  std::string text = "| typed | known from | taken as |\n|---|---|---|\n";
  for (const auto& [answer, names] : rows) text += fmt::format("| {} | {} |\n", fmt::join(names, ", "), answer);
  return text;
}

std::string GoldenVectors() {
  std::string text;
  for (const Format& format : formats::All()) {
    for (const SideKind kind : {SideKind::kK, SideKind::kV}) {
      const Format& side = OnSide(format, kind == SideKind::kK);
      if (kind == SideKind::kV && &side == &format) continue;
      for (const bool rotated : {false, true}) {
        if (rotated && !side.hadamard) continue;
        const bool plain = !rotated && side.hadamard;
        const KvScheme scheme = KvScheme::Parse(fmt::format("{}{}", Uncalibrated(format), plain ? "-hadamard" : ""));
        const CellShape rows = {.tokens = std::max(1, side.scaling.token_group), .head_dim = 32};
        std::vector<float> x(static_cast<size_t>(rows.tokens) * 32);
        for (size_t i = 0; i < x.size(); ++i) x[i] = (static_cast<float>(i % 32) - 12.5F + i / 32) * 0.375F;
        const formats::CellSections sections = PlanRows(side, rows);
        const auto bytes = EncodeCell(scheme, kind, x, rows);
        constexpr size_t kShown = 16;
        const auto code_bytes = static_cast<size_t>(sections.row_bytes);
        const std::string name = fmt::format("{}{}{}", Uncalibrated(format), plain ? "-hadamard" : "",
                                             format.value_side == nullptr ? ""
                                             : kind == SideKind::kK       ? ", K"
                                                                          : ", V");
        text += fmt::format("    {:<33}codes  {}{}\n", name, Hex(bytes.data(), std::min(code_bytes, kShown)),
                            code_bytes > kShown ? " ..." : "");
        const auto section = [&](const char* label, int64_t offset, int element_bytes) {
          if (element_bytes == 0) return;
          text += fmt::format("    {:<33}{}  {}\n", "", label,
                              Hex(bytes.data() + offset, static_cast<size_t>(element_bytes)));
        };
        const formats::Scaling& scaling = side.scaling;
        section("scale", sections.block_scales, Bytes(scaling.block));
        section("zero ", sections.block_offsets, scaling.block_offset ? 2 : 0);
        section("scale", sections.token_scales, Bytes(scaling.token));
        section("zero ", sections.token_offsets, scaling.token_offset ? 2 : 0);
        section("scale", sections.channel_scales, scaling.token_group != 0 ? 2 : 0);
        section("zero ", sections.channel_offsets, scaling.token_group != 0 ? 2 : 0);
      }
    }
  }
  return text;
}

}  // namespace kvanta::formats_doc
