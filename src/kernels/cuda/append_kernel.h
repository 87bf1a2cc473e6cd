// Append: one warp for each (row, KV head) of a side transforms the row, encodes it by the format's own source and
// stores it in the cache's layout. Pages that close go the same way, from their exact cells. A unit that includes this
// has included the primitives.
#pragma once

#include "formats/format_traits.h"
#include "kernels/cuda/hadamard_rows.h"
#include "kernels/cuda/launch.h"

namespace kvanta::kernels::cuda {

inline constexpr int kAppendWarps = 4;
inline constexpr int kLongestHead = 256;

// A warp's shared memory: the row, and the planes that it is encoded to.
inline constexpr int kAppendRowBytes = 4 * kLongestHead;
inline constexpr int kCodesAt = kAppendRowBytes;
inline constexpr int kBlockScalesAt = kCodesAt + 4 * kLongestHead;
inline constexpr int kBlockZerosAt = kBlockScalesAt + kLongestHead;
inline constexpr int kTokenScalesAt = kBlockZerosAt + kLongestHead;
inline constexpr int kAppendBytes = kTokenScalesAt + 32;

template <class Format>
struct RowEncoder {
  static constexpr formats::Scaling kScaling = Format::kScaling;
  static constexpr formats::CodeInfo kCode = formats::Info(Format::kCode);
  static constexpr int kBits = kCode.low_bits + kCode.high_bits;
  static constexpr int kBlockBytes = formats::Bytes(kScaling.block);
  static constexpr int kTokenBytes = formats::Bytes(kScaling.token);
  static constexpr int kBlock = kBlockBytes == 0 ? kLongestHead : kScaling.channels;  // none is as one that never ends
  // Channels that a lane may encode on their own, as a row of that length; 0: the row is encoded as one.
  static constexpr int kAlone = kScaling.token != formats::ScaleType::kNone || kCode.high_bits != 0 ? 0
                                : kScaling.block != formats::ScaleType::kNone                       ? kScaling.channels
                                                                                                    : 8;

  // Encodes the warp's row, f32 at `base`, into the planes behind it.
  static KVANTA_DEVICE void Encode(int base, int head_dim, float scale, int lane, formats::EncodeCounts& counts) {
    const int step = kAlone == 0 ? head_dim : kAlone;
    const int blocks = step / kBlock;
    for (int begin = lane * step; begin < head_dim; begin += kWarp * step) {
      const auto* x = reinterpret_cast<const float*>(Shared(base + 4 * begin, 4 * step, 4, Access::kRead));
      const int block = begin / kBlock;
      const auto plane = [&](int at, int count) { return Shared(base + at, count, 1, Access::kWrite); };
      formats::RowPlanes out;
      out.codes = plane(kCodesAt + begin * kBits / 8, step * kBits / 8);
      if (kBlockBytes != 0) out.block_scales = plane(kBlockScalesAt + block * kBlockBytes, blocks * kBlockBytes);
      if (kScaling.block_zero) out.block_zeros = plane(kBlockZerosAt + block * 2, blocks * 2);
      if (kTokenBytes != 0) out.token_scales = plane(kTokenScalesAt, kTokenBytes);
      if (kScaling.token_zero) out.token_zeros = plane(kTokenScalesAt + 16, 2);
      Format::EncodeRow(x, step, scale, out, counts);
    }
  }

  static KVANTA_DEVICE bool IsZero(int at, int bytes) {
    for (int i = 0; i < bytes; ++i) {
      if (LoadShared<uint8_t>(at + i) != 0) return false;
    }
    return true;
  }

  // Scales that are zero, among this lane's.
  static KVANTA_DEVICE void CountZeroScales(int base, int head_dim, int lane, AppendSums& sums) {
    if (kBlockBytes != 0 && kScaling.block != formats::ScaleType::kE8M0 && !kScaling.block_zero) {
      for (int block = lane; block < head_dim / kBlock; block += kWarp) {
        sums.zero_blocks += IsZero(base + kBlockScalesAt + block * kBlockBytes, kBlockBytes) ? 1 : 0;
        ++sums.blocks;
      }
    } else if (kBlockBytes == 0 && kTokenBytes != 0 && kScaling.token != formats::ScaleType::kE8M0 &&
               !kScaling.token_zero && lane == 0) {
      sums.zero_blocks += IsZero(base + kTokenScalesAt, kTokenBytes) ? 1 : 0;
      ++sums.blocks;
    }
  }

  // The planes to slot `slot` of a cell in the cache's layout (formats/cell_layout.h).
  static KVANTA_DEVICE void Store(int base, const CellPlace& place, bool is_key, int head_dim, int page_size, int slot,
                                  int lane, uint8_t* cell) {
    const int row_bytes = head_dim * kBits / 8;
    uint8_t* codes = cell + place.codes;
    if (is_key) {
      uint8_t* line = codes + slot / 16 * (16 * row_bytes) + slot % 16 * 4;
      for (int unit = lane; unit < row_bytes / 4; unit += kWarp) {
        *reinterpret_cast<uint32_t*>(line + unit * 64) = LoadShared<uint32_t>(base + kCodesAt + 4 * unit);
      }
    } else {
      constexpr int kElement = kBits < 8 ? 1 : kBits / 8;
      constexpr int kTokens = 4 / kElement;
      uint8_t* line = codes + slot / kTokens * (kTokens * row_bytes) + slot % kTokens * kElement;
      for (int i = lane; i < row_bytes / kElement; i += kWarp) {
        for (int byte = 0; byte < kElement; ++byte) {
          line[i * 4 + byte] = LoadShared<uint8_t>(base + kCodesAt + i * kElement + byte);
        }
      }
    }
    if constexpr (kBlockBytes != 0) {
      for (int i = lane; i < head_dim / kBlock * kBlockBytes; i += kWarp) {
        const int block = i / kBlockBytes;
        cell[place.block_scales + (int64_t{block} * page_size + slot) * kBlockBytes + i % kBlockBytes] =
            LoadShared<uint8_t>(base + kBlockScalesAt + i);
      }
    }
    if (lane < kTokenBytes) {
      cell[place.token_scales + int64_t{slot} * kTokenBytes + lane] = LoadShared<uint8_t>(base + kTokenScalesAt + lane);
    }
  }
};

// The row of an exact cell: bf16, in the cache's layout.
KVANTA_DEVICE float ExactValue(const uint8_t* cell, bool is_key, int head_dim, int slot, int channel) {
  const int row_bytes = 2 * head_dim;
  const int64_t offset = is_key ? slot / 16 * (16 * row_bytes) + channel / 2 * 64 + slot % 16 * 4 + channel % 2 * 2
                                : slot / 2 * (2 * row_bytes) + channel * 4 + slot % 2 * 2;
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(cell + offset);
  return std::bit_cast<float>(uint32_t{bits} << 16U);
}

// A block of kAppendWarps warps, kAppendBytes of shared memory each. `Format`: what rows are encoded to.
template <class Format>
KVANTA_DEVICE void AppendBlock(const AppendSide& side) {
  const int lane = ThreadIndex() % kWarp;
  const int warp = ThreadIndex() / kWarp;
  const int base = warp * kAppendBytes;
  const int item = BlockIndex() * kAppendWarps + warp;
  if (item >= side.count * side.kv_heads) return;
  const int head = item % side.kv_heads;
  const RowPlace place = side.places[item / side.kv_heads];
  const int head_dim = side.head_dim;
  const float* row = side.rows + place.row * side.stride + head * head_dim;
  const uint8_t* exact = side.exact.base + place.exact * side.exact.bytes + side.exact_cell.first +
                         head * side.exact_cell.stride + side.exact_cell.codes;
  for (int c = lane; c < head_dim; c += kWarp) {
    float x = 0;
    if (side.from_exact) {
      x = ExactValue(exact, side.is_key, head_dim, place.slot, c);
    } else {
      x = side.mean != nullptr ? row[c] - side.mean[head * head_dim + c] : row[c];
    }
    StoreShared(base + 4 * c, x);
  }
  SyncWarp();
  if (!side.from_exact && side.hadamard) {
    HadamardRow(base, head_dim, side.hadamard_block, side.hadamard_norm, lane);
  }
  formats::EncodeCounts counts;
  AppendSums sums;
  RowEncoder<Format>::Encode(base, head_dim, side.scale[head], lane, counts);
  SyncWarp();
  if (!side.to_exact) RowEncoder<Format>::CountZeroScales(base, head_dim, lane, sums);
  const Records& records = side.to_exact ? side.exact : side.quantized;
  const CellPlace& cell = side.to_exact ? side.exact_cell : side.cell;
  RowEncoder<Format>::Store(
      base, cell, side.is_key, head_dim, side.page_size, place.slot, lane,
      records.base + (side.to_exact ? place.exact : place.quantized) * records.bytes + cell.first + head * cell.stride);
  // Of a page that closes, values and NaN were counted when they were written.
  if (!side.from_exact && counts.values != 0) AtomicAdd(&side.sums->values, counts.values);
  if (!side.from_exact && counts.nan != 0) AtomicAdd(&side.sums->nan, counts.nan);
  if (counts.saturated != 0) AtomicAdd(&side.sums->saturated, counts.saturated);
  if (sums.blocks != 0) AtomicAdd(&side.sums->blocks, sums.blocks);
  if (sums.zero_blocks != 0) AtomicAdd(&side.sums->zero_blocks, sums.zero_blocks);
}

}  // namespace kvanta::kernels::cuda
