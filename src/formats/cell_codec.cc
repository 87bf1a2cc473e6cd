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
  const Format& format = Find(side.format);
  const CellPlanes planes = PlanRows(format, shape);
  CheckParameters(parameters, side, shape);
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  if (x.size() != static_cast<size_t>(shape.tokens) * head_dim) {
    throw InputError(fmt::format("{} values for {} tokens of head_dim {}", x.size(), shape.tokens, shape.head_dim));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(planes.bytes), 0);
  std::vector<float> row(head_dim);
  EncodeCounts total;
  for (int token = 0; token < shape.tokens; ++token) {
    const float* source = x.data() + static_cast<size_t>(token) * head_dim;
    std::copy(source, source + head_dim, row.begin());
    for (size_t i = 0; i < parameters.mean.size(); ++i) row[i] -= parameters.mean[i];
    if (side.hadamard) Hadamard(row.data(), shape.head_dim);
    if (parameters.through_exact_page) {
      for (float& value : row) value = Bf16ToFloat(Bf16::Encode(value));
    }
    format.encode_row(row.data(), shape.head_dim, parameters.static_scale,
                      CanonicalRow(format, planes, token, bytes.data()), total);
  }
  if (counts != nullptr) *counts += total;
  return bytes;
}

std::vector<float> DecodeCell(const KvScheme& scheme, SideKind kind, std::span<const uint8_t> bytes, CellShape shape,
                              const CellParameters& parameters) {
  const KvSide& side = kind == SideKind::kK ? scheme.k : scheme.v;
  const Format& format = Find(side.format);
  const CellPlanes planes = PlanRows(format, shape);
  CheckParameters(parameters, side, shape);
  if (bytes.size() != static_cast<size_t>(planes.bytes)) {
    throw InputError(fmt::format("{} bytes for a {} cell of {} tokens of head_dim {}, which has {}", bytes.size(),
                                 format.name, shape.tokens, shape.head_dim, planes.bytes));
  }
  const auto head_dim = static_cast<size_t>(shape.head_dim);
  std::vector<float> x(static_cast<size_t>(shape.tokens) * head_dim);
  for (int token = 0; token < shape.tokens; ++token) {
    float* row = x.data() + static_cast<size_t>(token) * head_dim;
    format.decode_row(CanonicalRow(format, planes, token, bytes.data()), shape.head_dim, parameters.static_scale, row);
    if (side.hadamard) Hadamard(row, shape.head_dim);
    for (size_t i = 0; i < parameters.mean.size(); ++i) row[i] += parameters.mean[i];
  }
  return x;
}

}  // namespace kvanta::formats
