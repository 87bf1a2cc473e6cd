// The kernels that there are, as types: which sides each knows, where its outputs lie, what it copies ahead, and how
// that lies in shared memory. A unit that includes this has included the primitives.
//
// Keys and values meet in the logits alone, so a kernel is made of sides: those of one pair, or all that there are, of
// which the launch picks two.
#pragma once

#include <algorithm>

#include "formats/bf16.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/staged_cells.h"

namespace kvanta::kernels::cuda {

// One pair of formats and one head_dim: what is common is compiled for itself.
template <class KeyFormat, class ValueFormat, int kHeadDim>
struct PairKernel {
  using Keys = KeyFormat;
  using Values = ValueFormat;
  using Exact = StaticKvType<formats::Bf16>;
  // A layer of bf16 alone has nothing else to read.
  static constexpr bool kHasExact = !StaticKvType<Keys>::kBf16 || !StaticKvType<Values>::kBf16;
  static constexpr bool kHasUnquantized = false;  // channels of K in a cell of their own
  template <class Side>
  using Sides = std::conditional_t<Side::kBf16, KvTypeDispatch<Side>, KvTypeDispatch<Side, Exact>>;
  using KeyKvTypes = Sides<StaticKvType<Keys>>;
  using ValueKvTypes = Sides<StaticKvType<Values>>;
  using Outputs = RegisterOutputs<BlocksOf(kHeadDim)>;
  static constexpr int kResident = 3;  // blocks that a multiprocessor's registers are to hold

  // Chunks of keys, and of values, that are on their way to a warp while it computes: three blocks' fit into an H100's
  // shared memory, with 40 KB and more in flight.
  static constexpr bool kStaged = true;
  using StagedKeys = StagedCell<StaticKvType<Keys>, true, kHeadDim>;
  using StagedValues = StagedCell<StaticKvType<Values>, false, kHeadDim>;
  static constexpr int kChunkBytes = StagedKeys::kBytes + StagedValues::kBytes;
  static constexpr int kDepth = std::clamp((12 << 10) / kChunkBytes, 1, 3);
  static constexpr int kStageBytes = kDepth * kChunkBytes;

  static constexpr KVANTA_DEVICE int HeadDim(int /*of_layer*/) { return kHeadDim; }
};

// All pairs, every head_dim of up to 256, outlier channels, and pages of 16 tokens.
struct GenericKernel {
  template <DecodeKind... kDecodeKinds>
  using Sides = KvTypeDispatch<RuntimeKvType<kDecodeKinds>...>;
  using ValueKvTypes =
      Sides<DecodeKind::kFields, DecodeKind::kE2M1, DecodeKind::kInt8, DecodeKind::kE4M3, DecodeKind::kE3M2,
            DecodeKind::kE5M2, DecodeKind::kF16, DecodeKind::kBf16, DecodeKind::kF32>;
  using KeyKvTypes =
      Sides<DecodeKind::kFields, DecodeKind::kE2M1, DecodeKind::kInt8, DecodeKind::kE4M3, DecodeKind::kE3M2,
            DecodeKind::kE5M2, DecodeKind::kF16, DecodeKind::kLloyd, DecodeKind::kBf16, DecodeKind::kF32>;
  static constexpr bool kHasExact = true;
  static constexpr bool kHasUnquantized = true;
  using Outputs = SharedOutputs;
  static constexpr int kResident = 3;
  static constexpr bool kStaged = false;
  static constexpr int kStageBytes = 0;

  static constexpr KVANTA_DEVICE int HeadDim(int of_layer) { return of_layer; }
};

// The block's shared memory. A warp's results lie where query rows were, and chunks that were copied.
template <class Kernel>
struct AttendShared {
  static constexpr int kScales = 0;
  static constexpr int kBias = kScales + 4 * kQueryRows;
  static constexpr int kSums = kBias + 4 * kQueryRows;
  static constexpr int kStates = kSums + 4 * kQueryRows;
  static constexpr int kPages = kStates + kAttendWarps * kQueryRows * 8;
  static constexpr int kQuarterPages = kQuarterTokens / kMinPage;  // at most
  static constexpr int kResults = kPages + kAttendWarps * kQuarterPages * 8;

  static constexpr KVANTA_DEVICE int ResultBytes(int head_dim) {  // 16 rows of f32
    return kQueryRows * QueryRows::RowBytes(head_dim);
  }
  static constexpr KVANTA_DEVICE int WarpBytes(int head_dim) {
    return ResultBytes(head_dim) > Kernel::kStageBytes ? ResultBytes(head_dim) : Kernel::kStageBytes;
  }
  static constexpr KVANTA_DEVICE int Queries(int head_dim) { return kResults + kAttendWarps * WarpBytes(head_dim); }
  // Terms of the queries beside the layer's keys: three take more memory than some GPUs' blocks have, so only f32 has
  // them.
  static constexpr KVANTA_DEVICE int KeyTerms(const AttentionParams& layer) {
    constexpr int kMax = Kernel::KeyKvTypes::kTerms;
    return kMax > 2 && layer.k_type.kind != DecodeKind::kF32 ? 2 : kMax;
  }
  static constexpr KVANTA_DEVICE int ExactQueries(const AttentionParams& layer, int head_dim) {
    return Queries(head_dim) + QueryBytes(KeyTerms(layer), head_dim);
  }
  static constexpr KVANTA_DEVICE int UnquantizedQueries(const AttentionParams& layer, int head_dim) {
    const bool exact = Kernel::kHasExact && layer.exact.base != nullptr;
    return ExactQueries(layer, head_dim) + (exact ? QueryBytes(2, head_dim) : 0);
  }
};

}  // namespace kvanta::kernels::cuda
