#include "formats/cell_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "formats/bf16.h"
#include "formats/transform.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

void CheckParameters(const CellParameters& parameters, const KvSide& side, CellShape shape) {
  if (!(parameters.static_scale > 0.0F) || !std::isfinite(parameters.static_scale)) {
    throw InputError(fmt::format("static scale {}: must be finite and above 0", parameters.static_scale));
  }
  if (!parameters.mean.empty() && parameters.mean.size() != static_cast<size_t>(shape.head_dim)) {
    throw InputError(fmt::format("mean of {} channels for head_dim {}", parameters.mean.size(), shape.head_dim));
  }
  if (!parameters.mean.empty() && !side.mean)
    throw InputError("a mean is given, but the scheme has no +mean on this side");
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
  const CellPlanes planes = PlanRows(format, shape);
  CheckParameters(parameters, side, shape);
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  if (x.size() != static_cast<size_t>(shape.tokens) * head_dim) {
    throw InputError(fmt::format("{} values for {} tokens of head_dim {}", x.size(), shape.tokens, shape.head_dim));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(planes.bytes), 0);
  std::vector<float> rows(x.begin(), x.end());
  for (int token = 0; token < shape.tokens; ++token) {
    float* row = rows.data() + static_cast<size_t>(token) * head_dim;
    for (size_t i = 0; i < parameters.mean.size(); ++i) row[i] -= parameters.mean[i];
    if (side.hadamard) Hadamard(row, shape.head_dim);
    if (parameters.through_exact_page) {
      for (size_t i = 0; i < head_dim; ++i) row[i] = Bf16ToFloat(Bf16::Encode(row[i]));
    }
  }
  EncodeCounts total;
  const int step = std::max(1, format.scaling.tile);
  for (int token = 0; token < shape.tokens; token += step) {
    const float* first = rows.data() + static_cast<size_t>(token) * head_dim;
    if (format.encode_tile != nullptr) {
      format.encode_tile(first, shape.head_dim,
                         CanonicalTile(format, planes, shape.head_dim, token / step, bytes.data()), total);
    } else {
      format.encode_row(first, shape.head_dim, parameters.static_scale,
                        CanonicalRow(format, planes, token, bytes.data()), total);
    }
  }
  if (counts != nullptr) *counts += total;
  return bytes;
}

std::vector<float> DecodeCell(const KvScheme& scheme, SideKind kind, std::span<const uint8_t> bytes, CellShape shape,
                              const CellParameters& parameters) {
  const KvSide& side = kind == SideKind::kK ? scheme.k : scheme.v;
  const Format& format = OnSide(Find(side.format), kind == SideKind::kK);
  const CellPlanes planes = PlanRows(format, shape);
  CheckParameters(parameters, side, shape);
  if (bytes.size() != static_cast<size_t>(planes.bytes)) {
    throw InputError(fmt::format("{} bytes for a {} cell of {} tokens of head_dim {}, which has {}", bytes.size(),
                                 format.name, shape.tokens, shape.head_dim, planes.bytes));
  }
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  std::vector<float> x(static_cast<size_t>(shape.tokens) * head_dim);
  const int step = std::max(1, format.scaling.tile);
  for (int token = 0; token < shape.tokens; token += step) {
    float* first = x.data() + static_cast<size_t>(token) * head_dim;
    if (format.decode_tile != nullptr) {
      format.decode_tile(CanonicalTile(format, planes, shape.head_dim, token / step, bytes.data()), shape.head_dim,
                         first);
    } else {
      format.decode_row(CanonicalRow(format, planes, token, bytes.data()), shape.head_dim, parameters.static_scale,
                        first);
    }
  }
  for (int token = 0; token < shape.tokens; ++token) {
    float* row = x.data() + static_cast<size_t>(token) * head_dim;
    if (side.hadamard) Hadamard(row, shape.head_dim);
    for (size_t i = 0; i < parameters.mean.size(); ++i) row[i] += parameters.mean[i];
  }
  return x;
}

}  // namespace kvanta::formats
