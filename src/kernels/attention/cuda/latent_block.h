// Kernels for latents (MLA), of single tiles and of tile groups. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/latent_attention.h"

namespace kvanta::kernels::cuda {

template <class List>
struct StaticDispatch;
template <class... Format>
struct StaticDispatch<TypeList<Format...>> {
  using Type = KvTypeDispatch<StaticKvType<Format>...>;
};
using LatentTypes = StaticDispatch<LatentFormats>::Type;

// Single tiles, of all formats.
struct LatentTile {
  using StoredTypes = LatentTypes;
  using KvTypes = LatentTypes;
  // Rotated channels have the latents' format if that is not quantized.
  using RotatedTypes =
      KvTypeDispatch<StaticKvType<formats::Fp16>, StaticKvType<formats::Fp32>, StaticKvType<formats::Bf16>>;
  static constexpr int kRank = 0;
  static constexpr int kRotated = 0;
  static constexpr int kTiles = 1;
  static constexpr int kParts = 1;
  static constexpr bool kHasNoScales = false;  // not of all of them
};
struct LatentBlock {
  using Attention = LatentAttention<LatentTile>;
  static constexpr int kThreads = Attention::kThreads;
  static constexpr int kBlocksPerSm = 2;  // resident blocks per multiprocessor

  static constexpr int SharedBytes(const AttentionParams& params) { return Attention::SharedBytes(params); }
  static KVANTA_DEVICE void Run(const AttentionParams& params) {
    Attention::Run(params, *params.metadata);
    if (params.CombinesTiles()) CombineFinishedTiles(params);
  }
};

// Tile groups of a format, 64 rows: of latents of 512 channels with 64 rotated ones.
template <class Format>
struct LatentGroup {
  using Stored = StaticKvType<Format>;
  using Exact = StaticKvType<formats::Bf16>;
  static constexpr bool kIsQuantized = !Stored::kBf16 && Stored::kDecodeKind != DecodeKind::kF16;
  using StoredTypes = KvTypeDispatch<Stored>;
  using KvTypes = std::conditional_t<kIsQuantized, KvTypeDispatch<Stored, Exact>, StoredTypes>;
  using RotatedTypes = KvTypeDispatch<std::conditional_t<kIsQuantized, Exact, Stored>>;
  static constexpr int kRank = kMaxLatentRank;
  static constexpr int kRotated = 64;
  static constexpr int kTiles = kGroupTiles;
  static constexpr int kParts = 2;
  static constexpr bool kHasNoScales =
      !HasBlockScales(Stored::BlockScaling()) && Stored::TokenScaling() == formats::ScaleType::kNone;
};
template <class Format>
struct LatentGroupBlock {
  using Group = LatentGroup<Format>;
  using Attention = LatentAttention<Group>;
  static constexpr int kThreads = Attention::kThreads;

  // 0: no groups of these latents.
  static constexpr int SharedBytes(const AttentionParams& params) {
    const bool takes = params.head_dim == Group::kRank && params.unquantized_dim == Group::kRotated;
    return takes ? Attention::SharedBytes(params) : 0;
  }
  static KVANTA_DEVICE void Run(const AttentionParams& params) { Attention::Run(params, *params.group_metadata); }
};

// Calls f with a null pointer to the group block of the layer's format; not for f32, whose queries of 64 rows do not
// fit into shared memory.
template <class F>
void VisitLatentGroup(const AttentionParams& params, F f) {
  const auto visit = [&]<class... Format>(TypeList<Format...> /*list*/) {
    const auto try_format = [&]<class Own>(const Own* /*format*/) {
      if constexpr (!StaticKvType<Own>::kF32) {
        if (StaticKvType<Own>::kDecodeKind == params.k_type.decode) {
          f(static_cast<const LatentGroupBlock<Own>*>(nullptr));
        }
      }
    };
    (try_format(static_cast<const Format*>(nullptr)), ...);
  };
  visit(LatentFormats{});
}

}  // namespace kvanta::kernels::cuda
