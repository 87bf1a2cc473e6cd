#include "formats/cell.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

// A page has a multiple of 16 tokens, so its planes come out aligned without padding.
int64_t AlignPlane(int64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// Channels that head_dim must be a multiple of.
int ChannelStep(const Format& format, int head_dim) {
  return std::max(BlockChannels(format.scaling, head_dim), CodeChannels(format.code));
}

// Names of the formats that take head_dim, for the error message.
std::string FormatsFor(int head_dim) {
  std::string names;
  for (const Format& format : All()) {
    const Format& values = OnSide(format, false);
    if (head_dim % ChannelStep(format, head_dim) != 0 || head_dim % ChannelStep(values, head_dim) != 0) continue;
    names += names.empty() ? "" : ", ";
    names += format.name;
  }
  return names;
}

// The planes of `format` that a row starts at: RowPlanes or ConstRowPlanes.
template <class Planes, class Byte>
Planes RowAt(const Format& format, const CellPlanes& planes, int token, Byte* cell) noexcept {
  const auto at = [&](int64_t plane, int elements, int bytes) {
    return cell + plane + int64_t{token} * elements * bytes;
  };
  const Scaling& scaling = format.scaling;
  return {cell + planes.codes + token * planes.row_bytes, at(planes.block_scales, planes.blocks, Bytes(scaling.block)),
          at(planes.block_zeros, planes.blocks, 2), at(planes.token_scales, 1, Bytes(scaling.token)),
          at(planes.token_zeros, 1, 2)};
}

template <class Planes, class Byte>
Planes TileAt(const Format& format, const CellPlanes& planes, int head_dim, int tile, Byte* cell) noexcept {
  const int64_t meta = int64_t{tile} * head_dim * 2;
  return {cell + planes.codes + tile * format.scaling.tile * planes.row_bytes, cell + planes.channel_scales + meta,
          cell + planes.channel_zeros + meta};
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
  const int step = ChannelStep(format, shape.head_dim);
  if (shape.head_dim % step != 0) {
    throw InputError(
        fmt::format("{} has {} of {} channels, which do not divide head_dim {} ({} % {} = {}); formats that "
                    "take it: {}",
                    format.name, step == format.scaling.channels ? "blocks" : "units", step, shape.head_dim,
                    shape.head_dim, step, shape.head_dim % step, FormatsFor(shape.head_dim)));
  }
  const Scaling& scaling = format.scaling;
  if (scaling.tile != 0 && shape.tokens % scaling.tile != 0) {
    throw InputError(fmt::format("{} has scales over {} tokens, which do not divide the page of {}; take pages of {}",
                                 format.name, scaling.tile, shape.tokens,
                                 scaling.tile == 32 ? "32, 64 or 128" : "128"));
  }
  CellPlanes planes;
  planes.row_bytes = int64_t{shape.head_dim} * format.code_bits / 8;
  planes.blocks = scaling.channels == 0 ? 0 : shape.head_dim / BlockChannels(scaling, shape.head_dim);
  const int64_t tiles = scaling.tile == 0 ? 0 : shape.tokens / scaling.tile;
  int64_t end = 0;
  const auto plane = [&end](int64_t bytes) {
    const int64_t begin = end;
    end += AlignPlane(bytes);
    return begin;
  };
  const int64_t tokens = shape.tokens;
  planes.codes = plane(tokens * planes.row_bytes);
  planes.block_scales = plane(tokens * planes.blocks * Bytes(scaling.block));
  planes.block_zeros = plane(scaling.block_zero ? tokens * planes.blocks * 2 : 0);
  planes.token_scales = plane(tokens * Bytes(scaling.token));
  planes.token_zeros = plane(scaling.token_zero ? tokens * 2 : 0);
  planes.channel_scales = plane(tiles * shape.head_dim * 2);
  planes.channel_zeros = plane(tiles * shape.head_dim * 2);
  planes.bytes = end;
  return planes;
}

RowPlanes CanonicalRow(const Format& format, const CellPlanes& planes, int token, uint8_t* cell) noexcept {
  return RowAt<RowPlanes>(format, planes, token, cell);
}
ConstRowPlanes CanonicalRow(const Format& format, const CellPlanes& planes, int token, const uint8_t* cell) noexcept {
  return RowAt<ConstRowPlanes>(format, planes, token, cell);
}
TilePlanes CanonicalTile(const Format& format, const CellPlanes& planes, int head_dim, int tile,
                         uint8_t* cell) noexcept {
  return TileAt<TilePlanes>(format, planes, head_dim, tile, cell);
}
ConstTilePlanes CanonicalTile(const Format& format, const CellPlanes& planes, int head_dim, int tile,
                              const uint8_t* cell) noexcept {
  return TileAt<ConstTilePlanes>(format, planes, head_dim, tile, cell);
}

}  // namespace kvanta::formats
