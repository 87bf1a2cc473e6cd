#include "formats/cell_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "formats/bf16.h"
#include "formats/transform.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

void CheckLevels(const KvScheme& scheme) {
  if (scheme.ages.empty()) return;
  throw InputError(fmt::format("scheme {}: a cell is of one level; give the scheme of that", scheme.ToString()));
}

void CheckParameters(const CellParameters& parameters, const KvSide& side, CellShape shape) {
  if (!(parameters.static_scale > 0.0F) || !std::isfinite(parameters.static_scale)) {
    throw InputError(fmt::format("static scale {}: must be finite and above 0", parameters.static_scale));
  }
  if (parameters.static_scale != 1.0F && !Find(side.format).scaling.per_head) {  // it would have no effect
    throw InputError(fmt::format("static scale {}: {} has no static scale; leave it out, or give 1",
                                 parameters.static_scale, Find(side.format).name));
  }
  if (!parameters.mean.empty() && parameters.mean.size() != static_cast<size_t>(shape.head_dim)) {
    throw InputError(fmt::format("mean of {} channels for head_dim {}", parameters.mean.size(), shape.head_dim));
  }
  if (parameters.mean.empty() == (side.mean || side.query)) {
    throw InputError(side.query  ? "the scheme has +query on this side: give its matrix and the mean"
                     : side.mean ? "the scheme has +mean on this side: give the mean"
                                 : "a mean is given, but the scheme has no +mean on this side");
  }
  if (!std::ranges::all_of(parameters.mean, [](float mean) { return std::isfinite(mean); })) {
    throw InputError("the mean is not finite in all channels");
  }
  if ((parameters.query != nullptr) != side.query) {
    throw InputError(side.query ? "the scheme has +query on this side: give its matrix and the mean"
                                : "a +query matrix is given, but the scheme has no +query on this side");
  }
  if (side.query && (parameters.query->kv_heads() != 1 || parameters.query->head_dim() != shape.head_dim)) {
    throw InputError(fmt::format("+query matrices of {} heads of {} for one head of {}", parameters.query->kv_heads(),
                                 parameters.query->head_dim(), shape.head_dim));
  }
  const Format& format = Find(side.format);
  if (side.query && IsAllocated(format.code) != (parameters.query->Allocation(0) != nullptr)) {
    throw InputError(fmt::format("+query matrices {} bits of channels for {}",
                                 parameters.query->Allocation(0) != nullptr ? "with" : "without", format.name));
  }
  if (parameters.outliers.size() != static_cast<size_t>(side.outliers)) {
    throw InputError(fmt::format("{} outlier channels are given, but the scheme has +outliers={} on this side",
                                 parameters.outliers.size(), side.outliers));
  }
  int last = -1;
  for (const int channel : parameters.outliers) {
    if (channel <= last || channel >= shape.head_dim) {
      throw InputError(fmt::format("outlier channel {}: channels ascend, from 0 to {}", channel, shape.head_dim - 1));
    }
    last = channel;
  }
}

RowTransform TransformOf(const KvSide& side, const CellParameters& parameters, CellShape shape, CellShape padded) {
  return {.head_dim = shape.head_dim,
          .padding = padded.head_dim - shape.head_dim,
          .hadamard = side.hadamard && !side.query,
          .mean = parameters.mean.empty() ? nullptr : parameters.mean.data(),
          .outliers = parameters.outliers,
          .key_matrix = side.query ? parameters.query->KeyMatrix(0) : nullptr,
          .query_matrix = side.query ? parameters.query->QueryMatrix(0) : nullptr};
}

HeadParameters HeadOf(const CellParameters& parameters, const RowTransform& transform) {
  return {parameters.static_scale, parameters.query != nullptr ? parameters.query->Allocation(0) : nullptr,
          transform.hadamard ? 0 : transform.padding};
}

float ThroughBf16(float x) {
  return Bf16ToFloat(Bf16::Encode(x));
}

// Bytes of the bf16 cell of outlier channels, padded to 16 bytes for any number of tokens.
int64_t OutlierBytes(const KvSide& side, CellShape shape) {
  return RoundUp(Bf16Sections({shape.tokens, side.outliers}).bytes, 16);
}

}  // namespace

SideKind ParseSideKind(std::string_view text) {
  if (text == "k") return SideKind::kK;
  if (text == "v") return SideKind::kV;
  throw InputError(fmt::format("side '{}': must be k or v", text));
}

std::vector<uint8_t> EncodeCell(const KvScheme& scheme, SideKind kind, std::span<const float> x, CellShape shape,
                                const CellParameters& parameters, EncodeCounts* counts) {
  const KvSide& side = kind == SideKind::kK ? scheme.k : scheme.v;
  const Format& format = OnSide(Find(side.format), kind == SideKind::kK);
  const CellShape padded = PaddedShape(format, shape);
  const CellSections sections = PlanRows(format, padded);
  CheckLevels(scheme);
  CheckParameters(parameters, side, shape);
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  const auto width = static_cast<size_t>(padded.head_dim);
  if (x.size() != static_cast<size_t>(shape.tokens) * head_dim) {
    throw InputError(fmt::format("{} values for {} tokens of head_dim {}", x.size(), shape.tokens, shape.head_dim));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(sections.bytes + OutlierBytes(side, shape)), 0);
  std::vector<float> rows(static_cast<size_t>(shape.tokens) * width);
  std::vector<float> outlier_values(parameters.outliers.size());
  const RowTransform transform = TransformOf(side, parameters, shape, padded);
  uint8_t* const outliers = bytes.data() + sections.bytes;
  EncodeCounts outlier_counts;
  for (int token = 0; token < shape.tokens; ++token) {
    float* row = rows.data() + static_cast<size_t>(token) * width;
    transform.Forward(x.data() + static_cast<size_t>(token) * head_dim, row, outlier_values.data());
    if (parameters.via_bf16) std::transform(row, row + width, row, ThroughBf16);
    Bf16::EncodeRow(outlier_values.data(), side.outliers, 1.0F,
                    {.codes = outliers + int64_t{2} * token * side.outliers}, outlier_counts);
  }
  EncodeCounts total;
  const int step = std::max(1, format.scaling.token_group);
  for (int token = 0; token < shape.tokens; token += step) {
    const float* first = rows.data() + static_cast<size_t>(token) * width;
    if (format.encode_token_group != nullptr) {
      format.encode_token_group(first, padded.head_dim, HeadOf(parameters, transform),
                                CanonicalTokenGroup(format, sections, padded.head_dim, token / step, bytes.data()),
                                total);
    } else {
      format.encode_row(first, padded.head_dim, HeadOf(parameters, transform),
                        CanonicalRow(format, sections, token, bytes.data()), total);
    }
  }
  total.values = static_cast<int64_t>(x.size());  // padding does not count
  total.saturated += outlier_counts.saturated;    // as values they count among the row's
  total.nan += outlier_counts.nan;
  if (counts != nullptr) *counts += total;
  return bytes;
}

std::vector<float> DecodeCell(const KvScheme& scheme, SideKind kind, std::span<const uint8_t> bytes, CellShape shape,
                              const CellParameters& parameters) {
  const KvSide& side = kind == SideKind::kK ? scheme.k : scheme.v;
  const Format& format = OnSide(Find(side.format), kind == SideKind::kK);
  const CellShape padded = PaddedShape(format, shape);
  const CellSections sections = PlanRows(format, padded);
  CheckLevels(scheme);
  CheckParameters(parameters, side, shape);
  const int64_t expected = sections.bytes + OutlierBytes(side, shape);
  if (bytes.size() != static_cast<size_t>(expected)) {
    throw InputError(fmt::format("{} bytes for a cell of {} with {} tokens of head_dim {}, which has {}", bytes.size(),
                                 format.name, shape.tokens, shape.head_dim, expected));
  }
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  const auto width = static_cast<size_t>(padded.head_dim);
  const RowTransform transform = TransformOf(side, parameters, shape, padded);
  std::vector<float> rows(static_cast<size_t>(shape.tokens) * width);
  const int step = std::max(1, format.scaling.token_group);
  for (int token = 0; token < shape.tokens; token += step) {
    float* first = rows.data() + static_cast<size_t>(token) * width;
    if (format.decode_token_group != nullptr) {
      format.decode_token_group(CanonicalTokenGroup(format, sections, padded.head_dim, token / step, bytes.data()),
                                padded.head_dim, first);
    } else {
      format.decode_row(CanonicalRow(format, sections, token, bytes.data()), padded.head_dim,
                        HeadOf(parameters, transform), first);
    }
  }
  std::vector<float> x(static_cast<size_t>(shape.tokens) * head_dim);
  std::vector<float> outlier_values(parameters.outliers.size());
  for (int token = 0; token < shape.tokens; ++token) {
    Bf16::DecodeRow({.codes = bytes.data() + sections.bytes + int64_t{2} * token * side.outliers}, side.outliers, 1.0F,
                    outlier_values.data());
    float* row = rows.data() + static_cast<size_t>(token) * width;
    transform.Inverse(row, outlier_values.data());
    std::copy_n(row, head_dim, x.data() + static_cast<size_t>(token) * head_dim);
  }
  return x;
}

}  // namespace kvanta::formats
