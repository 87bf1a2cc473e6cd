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

// Specialized for one pair of formats and one head_dim.
template <class KeyFormat, class ValueFormat, int kHeadDim>
struct PairKernel {
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
  using Outputs = RegisterOutputs<BlocksOf(kHeadDim)>;
  static constexpr int kBlocksPerSm = 3;  // resident blocks per multiprocessor

  // Key and value chunks copied ahead per warp: three blocks fit into an H100's shared memory, with 40 KB or more in
  // flight.
  static constexpr bool kStaged = true;
  using StagedKeys = StagedCell<StaticKvType<Keys>, true, kHeadDim>;
  using StagedValues = StagedCell<StaticKvType<Values>, false, kHeadDim>;
  static constexpr int kChunkBytes = StagedKeys::kBytes + StagedValues::kBytes;
  static constexpr int kStages = std::clamp((12 << 10) / kChunkBytes, 1, 3);
  static constexpr int kStageBytes = kStages * kChunkBytes;

  static constexpr KVANTA_DEVICE int HeadDim(int /*of_layer*/) { return kHeadDim; }
};

// Any pair of formats, head_dim up to 256, outlier channels and pages of 16 tokens.
struct GenericKernel {
  template <DecodeKind... kDecodeKinds>
  using RuntimeTypes = KvTypeDispatch<RuntimeKvType<kDecodeKinds>...>;
  using ValueTypes =
      RuntimeTypes<DecodeKind::kFields, DecodeKind::kE2M1, DecodeKind::kInt8, DecodeKind::kE4M3, DecodeKind::kE3M2,
                   DecodeKind::kE5M2, DecodeKind::kF16, DecodeKind::kBf16, DecodeKind::kF32>;
  using KeyTypes =
      RuntimeTypes<DecodeKind::kFields, DecodeKind::kE2M1, DecodeKind::kInt8, DecodeKind::kE4M3, DecodeKind::kE3M2,
                   DecodeKind::kE5M2, DecodeKind::kF16, DecodeKind::kLloyd, DecodeKind::kBf16, DecodeKind::kF32>;
  static constexpr bool kHasExact = true;
  static constexpr bool kHasUnquantized = true;
  using Outputs = SharedOutputs;
  static constexpr int kBlocksPerSm = 3;
  static constexpr bool kStaged = false;
  static constexpr int kStageBytes = 0;

  static constexpr KVANTA_DEVICE int HeadDim(int head_dim) { return head_dim; }
};

// The block's shared memory. A warp's results overwrite the query rows and the staged chunks.
template <class Kernel>
struct AttentionLayout {
  static constexpr int kScales = 0;
  static constexpr int kBias = kScales + 4 * kQueryRows;
  static constexpr int kSums = kBias + 4 * kQueryRows;
  static constexpr int kStates = kSums + 4 * kQueryRows;
  static constexpr int kPages = kStates + kAttendWarps * kQueryRows * 8;
  static constexpr int kQuarterPages = kQuarterTokens / kMinPage;  // maximum
  static constexpr int kResults = kPages + kAttendWarps * kQuarterPages * 8;

  static constexpr KVANTA_DEVICE int ResultBytes(int head_dim) {  // 16 rows of f32
    return kQueryRows * QueryRows::RowBytes(head_dim);
  }
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
    return Queries(head_dim) + QueryBytes(KeyTerms(params), head_dim);
  }
  static constexpr KVANTA_DEVICE int UnquantizedQueries(const AttentionParams& params, int head_dim) {
    const bool exact = Kernel::kHasExact && params.exact.base != nullptr;
    return ExactQueries(params, head_dim) + (exact ? QueryBytes(2, head_dim) : 0);
  }
};

}  // namespace kvanta::kernels::cuda
