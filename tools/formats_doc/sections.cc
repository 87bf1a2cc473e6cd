#include "sections.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <vector>

#include "formats/cell_codec.h"
#include "formats/names.h"

namespace kvanta::formats_doc {
namespace {

using formats::CellShape;
using formats::Code;
using formats::Format;
using formats::SideKind;

constexpr CellShape kShape = {.tokens = 64, .head_dim = 128};

double Bits(const Format& format) {
  return static_cast<double>(formats::PlanCell(format, kShape).bytes) * 8 / (kShape.tokens * kShape.head_dim);
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

// Mean squared error over mean square, of rows that went through the format's preset.
double Distortion(const Format& format) {
  constexpr CellShape kRows = {.tokens = 4096, .head_dim = 128};
  static const std::vector<float> x = Normal(size_t{kRows.tokens} * kRows.head_dim);
  const KvScheme scheme = KvScheme::Parse(format.name);
  const auto bytes = EncodeCell(scheme, SideKind::kV, x, kRows);
  const auto decoded = DecodeCell(scheme, SideKind::kV, bytes, kRows);
  double error = 0;
  double square = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += (double{x[i]} - decoded[i]) * (double{x[i]} - decoded[i]);
    square += double{x[i]} * x[i];
  }
  return error / square;
}

std::string_view CodeDrawing(Code code) {
  static const std::map<Code, std::string_view> kDrawings = {
      {Code::kFp32, "s eeeeeeee mmmmmmm mmmmmmmm mmmmmmmm   4 bytes, IEEE single"},
      {Code::kBf16, "s eeeeeeee mmmmmmm                     2 bytes, the upper half of an IEEE single"},
      {Code::kFp16, "s eeeee mmmmmmmmmm                     2 bytes, IEEE half"},
      {Code::kE4M3, "s eeee mmm                             bias 7; 0x7f and 0xff are NaN, no infinities (E4M3FN)"},
      {Code::kE5M2, "s eeeee mm                             bias 15; 0x7c infinity (never written), 0x7d.. NaN"},
      {Code::kInt8, "iiiiiiii                               two's complement, -128 unused"},
      {Code::kInt4, "hhhh llll                              low nibble: even channel, high: odd; nibble = code + 8"}};
  return kDrawings.at(code);
}

std::string ScaleText(const Format& format) {
  switch (format.scale) {
    case formats::Scale::kNone:
      return "none";
    case formats::Scale::kStatic:
      return "static, f32 per head, outside the page";
    case formats::Scale::kPerToken:
      return "fp16 per (token, head)";
    case formats::Scale::kPerBlock:
      return fmt::format("fp16 per {} channels", format.block);
  }
  return "";
}

std::string Hex(const uint8_t* bytes, size_t n) {
  std::string text;
  for (size_t i = 0; i < n; ++i) text += fmt::format("{}{:02x}", i == 0 ? "" : " ", bytes[i]);
  return text;
}

std::string CellDrawing(const Format& format) {
  const formats::CellPlanes planes = PlanCell(format, kShape);
  std::string text =
      fmt::format("    {:>6}  codes         {} tokens x {} bytes\n", planes.codes, kShape.tokens, planes.row_bytes);
  if (planes.blocks != 0) {
    text += fmt::format("    {:>6}  block scales  {} tokens x {} blocks x {} bytes\n", planes.block_scales,
                        kShape.tokens, planes.blocks, format.block_scale_bytes);
  }
  if (format.token_scale_bytes != 0) {
    text += fmt::format("    {:>6}  token scales  {} tokens x {} bytes\n", planes.token_scales, kShape.tokens,
                        format.token_scale_bytes);
  }
  return text + fmt::format("    {:>6}  end\n", planes.bytes);
}

}  // namespace

std::string FormatTable() {
  std::string text =
      "| name | aliases | bits | scale | head_dim | hadamard | exact | sink | distortion |\n"
      "|---|---|---|---|---|---|---|---|---|\n";
  for (const Format& format : formats::All()) {
    const double distortion = Distortion(format);
    text += fmt::format("| `{}` | {} | {} | {} | multiple of {} | {} | {} | {} | {} |\n", format.name,
                        fmt::join(format.aliases, ", "), Bits(format), ScaleText(format),
                        format.block == 0 ? 8 : format.block, format.hadamard ? "yes" : "no",
                        format.exact == ExactPages::kOpen ? "open" : "none", format.sink_pages,
                        distortion == 0 ? "0" : fmt::format("{:.2e}", distortion));
  }
  return text;
}

std::string FormatDetails() {
  std::string text;
  for (const Format& format : formats::All()) {
    text += fmt::format("### `{}`\n{}.\n\n", format.name, format.summary);
    text += fmt::format("    element   {}\n", CodeDrawing(format.code));
    text += fmt::format("    encode    {}\n\n", format.rule);
    text +=
        fmt::format("A cell of {} tokens at head_dim {}:\n\n{}\n", kShape.tokens, kShape.head_dim, CellDrawing(format));
  }
  text.pop_back();
  return text;
}

std::string SchemeTable() {
  std::string text = "| text | means | exact | sink |\n|---|---|---|---|\n";
  for (const char* typed : {"int8", "int4", "fp8", "int4+exact=none", "int4+sink=0", "int8-hadamard", "int8+exact=open",
                            "k=int8,v=int4", "k=int4+mean,v=int4", "k=bf16,v=int8+exact=none"}) {
    const KvScheme scheme = KvScheme::Parse(typed);
    const auto side = [](const KvSide& s) {
      return fmt::format("{}{}{}", s.format, s.hadamard ? " + hadamard" : "", s.mean ? " + mean" : "");
    };
    text += fmt::format("| `{}` | K {}, V {} | {} | {} |\n", typed, side(scheme.k), side(scheme.v),
                        scheme.exact == ExactPages::kOpen ? "open" : "none", scheme.sink_pages);
  }
  return text;
}

std::string ForeignTable() {
  // Names of one origin with the same answer share a row.
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  for (const formats::ForeignName& foreign : formats::ForeignNames()) {
    const std::string answer = foreign.format.empty() ? fmt::format("{} | refused: {}", foreign.origin, foreign.reason)
                                                      : fmt::format("{} | `{}`", foreign.origin, foreign.format);
    auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& other) { return other.first == answer; });
    if (row == rows.end()) row = rows.insert(rows.end(), {answer, {}});
    row->second.push_back(fmt::format("`{}`", foreign.name));
  }
  std::string text = "| typed | known from | taken as |\n|---|---|---|\n";
  for (const auto& [answer, names] : rows) text += fmt::format("| {} | {} |\n", fmt::join(names, ", "), answer);
  return text;
}

std::string GoldenVectors() {
  std::vector<float> x(32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = (static_cast<float>(i) - 12.5F) * 0.375F;
  std::string text;
  for (const Format& format : formats::All()) {
    for (const bool rotated : {false, true}) {
      if (rotated && !format.hadamard) continue;
      const KvScheme scheme =
          KvScheme::Parse(fmt::format("{}{}", format.name, !rotated && format.hadamard ? "-hadamard" : ""));
      const CellShape row = {.tokens = 1, .head_dim = 32};
      const formats::CellPlanes planes = PlanRows(format, row);
      const auto bytes = EncodeCell(scheme, SideKind::kK, x, row);
      constexpr size_t kShown = 16;
      const auto code_bytes = static_cast<size_t>(planes.row_bytes);
      text += fmt::format("    {:<14}codes  {}{}\n",
                          rotated || !format.hadamard ? format.name : std::string(format.name) + "-hadamard",
                          Hex(bytes.data(), std::min(code_bytes, kShown)), code_bytes > kShown ? " ..." : "");
      const auto scale = [&](int64_t offset, int scale_bytes) {
        if (scale_bytes == 0) return;
        text += fmt::format("    {:<14}scale  {}\n", "", Hex(bytes.data() + offset, static_cast<size_t>(scale_bytes)));
      };
      scale(planes.block_scales, format.block_scale_bytes);
      scale(planes.token_scales, format.token_scale_bytes);
    }
  }
  return text;
}

}  // namespace kvanta::formats_doc
