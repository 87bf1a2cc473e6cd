#include "formats/cell.h"

#include <fmt/format.h>

#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

// A page has a multiple of 16 tokens, so its planes come out aligned without padding.
int64_t AlignPlane(int64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// Names of the formats that take head_dim, for the error message.
std::string FormatsFor(int head_dim) {
  std::string names;
  for (const Format& format : All()) {
    if (format.block != 0 && head_dim % format.block != 0) continue;
    names += names.empty() ? "" : ", ";
    names += format.name;
  }
  return names;
}

}  // namespace

CellPlanes PlanCell(const Format& format, CellShape shape) {
  if (shape.tokens != 16 && shape.tokens != 32 && shape.tokens != 64 && shape.tokens != 128) {
    throw InputError(fmt::format("page size {}: must be 16, 32, 64 or 128 tokens", shape.tokens));
  }
  return PlanRows(format, shape);
}

CellPlanes PlanRows(const Format& format, CellShape shape) {
  if (shape.tokens < 1) throw InputError(fmt::format("{} tokens: at least one is needed", shape.tokens));
  if (shape.head_dim < kMinHeadDim || shape.head_dim > kMaxHeadDim || shape.head_dim % 8 != 0) {
    throw InputError(
        fmt::format("head_dim {}: must be a multiple of 8 from {} to {}", shape.head_dim, kMinHeadDim, kMaxHeadDim));
  }
  if (format.block != 0 && shape.head_dim % format.block != 0) {
    throw InputError(fmt::format(
        "{} has blocks of {} channels, which do not divide head_dim {} ({} % {} = {}); formats that take it: {}",
        format.name, format.block, shape.head_dim, shape.head_dim, format.block, shape.head_dim % format.block,
        FormatsFor(shape.head_dim)));
  }
  CellPlanes planes;
  planes.row_bytes = int64_t{shape.head_dim} * format.code_bits / 8;
  planes.blocks = format.block == 0 ? 0 : shape.head_dim / format.block;
  planes.codes = 0;
  planes.block_scales = AlignPlane(shape.tokens * planes.row_bytes);
  planes.token_scales =
      planes.block_scales + AlignPlane(int64_t{shape.tokens} * planes.blocks * format.block_scale_bytes);
  planes.bytes = planes.token_scales + AlignPlane(int64_t{shape.tokens} * format.token_scale_bytes);
  return planes;
}

}  // namespace kvanta::formats
