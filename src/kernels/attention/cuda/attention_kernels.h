// The attention kernels as types: the K/V types each supports, its accumulators, asynchronous copies and shared-memory
// layout. Include the primitives first.
//
// Keys and values interact through the logits only, so a kernel is composed of a key type and a value type: one fixed
// pair, or any two, dispatched at run time.
#pragma once

#include <algorithm>

#include "formats/bf16.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/queries.h"
#include "kernels/attention/cuda/staged_cells.h"

namespace kvanta::kernels::cuda {

// Specialized for one pair of formats and one head_dim; `kRowTiles`: of a query tile.
template <class KeyFormat, class ValueFormat, int kHeadDim, int kRowTiles>
struct StaticKernel {
  using Keys = KeyFormat;
  using Values = ValueFormat;
  using Exact = StaticKvType<formats::Bf16>;
  // A bf16 layer has no other record to read.
  static constexpr bool kHasExact = !StaticKvType<Keys>::kBf16 || !StaticKvType<Values>::kBf16;
  static constexpr bool kHasUnquantized = false;  // unquantized channels of K
  template <class KvType>
  using WithExact = std::conditional_t<KvType::kBf16, KvTypeDispatch<KvType>, KvTypeDispatch<KvType, Exact>>;
  using KeyTypes = WithExact<StaticKvType<Keys>>;
  using ValueTypes = WithExact<StaticKvType<Values>>;
  using Outputs = RegisterOutputs<kRowTiles, BlocksOf(kHeadDim)>;

  // Key and value chunks copied ahead per warp. With small chunks, four resident blocks hide the latencies of
  // arithmetic; with large ones, three blocks have the shared memory for two chunks. Trellis codes want their
  // registers.
  using StagedKeys = StagedCell<StaticKvType<Keys>, true, kHeadDim>;
  using StagedValues = StagedCell<StaticKvType<Values>, false, kHeadDim>;
  static constexpr int kChunkBytes = StagedKeys::kBytes + StagedValues::kBytes;
  static constexpr bool kStaged = kChunkBytes <= (20 << 10);  // of larger ones, loads in flight are in registers
  static constexpr bool kHasTrellis = StaticKvType<Keys>::kTrellis || StaticKvType<Values>::kTrellis;
  static constexpr int kOutputRegisters = kRowTiles * kHeadDim / 4;
  static constexpr int kBlocksPerSm = kOutputRegisters > 64                                        ? 2
                                      : kRowTiles == 1 && kChunkBytes <= (6 << 10) && !kHasTrellis ? 4
                                                                                                   : 3;
  static constexpr int kStages = std::clamp((kBlocksPerSm == 4 ? 12 << 10 : 17 << 10) / kChunkBytes, 1, 3);
  static constexpr int kStageBytes = kStaged ? kStages * kChunkBytes : 0;
  // Tile groups (group_block.h) have the registers that eight warps leave.
  static constexpr int kGroupBlocksPerSm = 2;

  static constexpr KVANTA_DEVICE int HeadDim(int /*of_layer*/) { return kHeadDim; }
};

// Any pair of formats, head_dim up to 512, outlier channels and pages of 16 tokens.
template <int kRowTiles>
struct RuntimeKernel {
  template <DecodeKind... kDecodeKinds>
  using RuntimeTypes = KvTypeDispatch<RuntimeKvType<kDecodeKinds>...>;
  using ValueTypes =
      RuntimeTypes<DecodeKind::kFields, DecodeKind::kE2M1, DecodeKind::kInt8, DecodeKind::kE4M3, DecodeKind::kE3M2,
                   DecodeKind::kE5M2, DecodeKind::kF16, DecodeKind::kTrellis, DecodeKind::kBf16, DecodeKind::kF32>;
  using KeyTypes = RuntimeTypes<DecodeKind::kFields, DecodeKind::kE2M1, DecodeKind::kInt8, DecodeKind::kE4M3,
                                DecodeKind::kE3M2, DecodeKind::kE5M2, DecodeKind::kF16, DecodeKind::kLloyd,
                                DecodeKind::kTrellis, DecodeKind::kKlt, DecodeKind::kBf16, DecodeKind::kF32>;
  static constexpr bool kHasExact = true;
  static constexpr bool kHasUnquantized = true;
  using Outputs = SharedOutputs<kRowTiles>;
  static constexpr int kBlocksPerSm = 3;
  static constexpr bool kStaged = false;
  static constexpr int kStageBytes = 0;

  static constexpr KVANTA_DEVICE int HeadDim(int head_dim) { return head_dim; }
};

// The kernel of an entry of the list for query tiles of `kRowTiles`. That of latents is one for all.
template <class Listed, int kRowTiles>
struct KernelFor {
  using Type = Listed;
};
template <class KeyFormat, class ValueFormat, int kHeadDim, int kRowTiles>
struct KernelFor<PairKernel<KeyFormat, ValueFormat, kHeadDim>, kRowTiles> {
  using Type = StaticKernel<KeyFormat, ValueFormat, kHeadDim, kRowTiles>;
};

template <int kRowTiles>
struct KernelFor<GenericKernel, kRowTiles> {
  using Type = RuntimeKernel<kRowTiles>;
};

// The kernel of an entry of the list for tile groups.
template <class Listed>
using GroupKernel = typename KernelFor<Listed, kQueryRows / kRowsPerMma>::Type;

// Calls f(type) with a pointer to the kernel for a step whose tiles have up to params.tile_rows rows.
template <class Listed, class F>
void VisitKernel(const AttentionParams& params, F f) {
  if (params.tile_rows <= kRowsPerMma) {
    f(static_cast<typename KernelFor<Listed, 1>::Type*>(nullptr));
  } else {
    f(static_cast<typename KernelFor<Listed, kQueryRows / kRowsPerMma>::Type*>(nullptr));
  }
}

// Offsets of a tile's query rows in the block's shared memory: [R] f32 each of scales, biases and sums, f32 rows, the
// operands made of them (queries.h), and the levels of trellis codes.
struct TileMemory {
  int scales, bias, sums;
  int rows, unquantized_rows;
  int queries, exact_queries, unquantized_queries;
  int key_levels, value_levels;
};

// The block's shared memory. A warp's results overwrite the query rows and the staged chunks.
template <class Kernel>
struct AttentionLayout {
  static constexpr int kRowTiles = Kernel::Outputs::kRowTiles;
  static constexpr int kRows = kRowTiles * kRowsPerMma;
  static constexpr int kScales = 0;
  static constexpr int kBias = kScales + 4 * kRows;
  static constexpr int kSums = kBias + 4 * kRows;
  static constexpr int kStates = kSums + 4 * kRows;
  static constexpr int kPages = kStates + kAttendWarps * kRows * 8;
  static constexpr int kQuarterPages = kQuarterTokens / kMinPage;  // maximum
  static constexpr int kResults = kPages + kAttendWarps * kQuarterPages * 8;

  static constexpr KVANTA_DEVICE int ResultBytes(int head_dim) { return kRows * QueryRows::RowBytes(head_dim); }  // f32
  static constexpr KVANTA_DEVICE int WarpBytes(int head_dim) {
    return ResultBytes(head_dim) > Kernel::kStageBytes ? ResultBytes(head_dim) : Kernel::kStageBytes;
  }
  static constexpr KVANTA_DEVICE int Queries(int head_dim) { return kResults + kAttendWarps * WarpBytes(head_dim); }
  // Query terms for the layer's keys. Three exceed the shared memory of some GPUs, so only f32 keys have them.
  static constexpr KVANTA_DEVICE int KeyTerms(const AttentionParams& params) {
    constexpr int kMax = Kernel::KeyTypes::kTerms;
    return kMax > 2 && params.k_type.decode != DecodeKind::kF32 ? 2 : kMax;
  }
  static constexpr KVANTA_DEVICE int ExactQueries(const AttentionParams& params, int head_dim) {
    return Queries(head_dim) + QueryBytes(KeyTerms(params), kRowTiles, head_dim);
  }
  static constexpr KVANTA_DEVICE int UnquantizedQueries(const AttentionParams& params, int head_dim) {
    const bool exact = Kernel::kHasExact && params.exact.base != nullptr;
    return ExactQueries(params, head_dim) + (exact ? QueryBytes(2, kRowTiles, head_dim) : 0);
  }
  // Levels of trellis codes.
  static constexpr KVANTA_DEVICE int KeyLevels(const AttentionParams& params, int head_dim) {
    return UnquantizedQueries(params, head_dim) +
           (Kernel::kHasUnquantized ? QueryBytes(2, kRowTiles, params.unquantized_dim) : 0);
  }
  static constexpr KVANTA_DEVICE int ValueLevels(const AttentionParams& params, int head_dim) {
    return KeyLevels(params, head_dim) + SharedLevels::Bytes(params.k_type, head_dim);
  }
  static constexpr KVANTA_DEVICE int Bytes(const AttentionParams& params, int head_dim) {
    return ValueLevels(params, head_dim) + SharedLevels::Bytes(params.v_type, head_dim);
  }
  static constexpr KVANTA_DEVICE TileMemory Memory(const AttentionParams& params, int head_dim) {
    return {.scales = kScales,
            .bias = kBias,
            .sums = kSums,
            .rows = kResults,
            .unquantized_rows = kResults + ResultBytes(head_dim),
            .queries = Queries(head_dim),
            .exact_queries = ExactQueries(params, head_dim),
            .unquantized_queries = UnquantizedQueries(params, head_dim),
            .key_levels = KeyLevels(params, head_dim),
            .value_levels = ValueLevels(params, head_dim)};
  }
};

}  // namespace kvanta::kernels::cuda
