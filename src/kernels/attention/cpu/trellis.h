// Trellis codes (formats/trellis.h) by 8-bit operands, and keys with uneven bits (klt.h) by 16-bit ones. Codes are
// decoded to int8: in registers where few rows read a page and the unit has primitives for it, else in the workspace,
// once for all rows. Included by isa_<isa>.cc after its TrellisKeys and TrellisValues, and values.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/values.h"

namespace kvanta::kernels {
namespace {

// True if a call has so few rows that codes are decoded for them alone.
KVANTA_INLINE bool Fuses(int rows, WorkspaceUse workspace_use) {
  return rows <= kMaxFusedRows && workspace_use == WorkspaceUse::kNone;
}

// ---- keys

// Scores kRows rows on groups [0, pass.groups), decoded in registers. Groups are group_bytes apart.
template <int kRows, class Keys>
KVANTA_INLINE void ScoreFusedRows(const KeyPass& pass, const Keys& keys, int64_t group_bytes, Prefetcher& prefetch) {
  const uint8_t* operands[kRows];
  int32_t bias[kRows];
  for (int r = 0; r < kRows; ++r) {
    operands[r] = pass.query + r * pass.query_stride;
    __builtin_memcpy(bias + r, operands[r] + BiasOffset<typename Keys::Decoder>(pass.cell.head_dim), sizeof bias[r]);
  }
  int group = 0;
  const auto score = [&]<int kGroups>() __attribute__((always_inline)) {
    Vec16::F sums[kRows * kGroups];
    keys.template Dot<kGroups, kRows>(pass.cell.codes + group * group_bytes, group_bytes, operands, bias, sums,
                                      prefetch);
    StoreScores<kGroups, kRows>(pass, group, 0, sums);
    group += kGroups;
  };
  while (group + kGroupsUnroll <= pass.groups) score.template operator()<kGroupsUnroll>();
  if (group < pass.groups) score.template operator()<1>();
}

template <class Keys>
KVANTA_INLINE void ScoreFused(const KeyPass& pass, const Keys& keys, int64_t group_bytes) {
  static_assert(kMaxFusedRows <= 4 && kGroupsUnroll <= 2);
  Prefetcher prefetch{pass.prefetch, (pass.groups + kGroupsUnroll - 1) / kGroupsUnroll * keys.Lines()};
  if constexpr (kMaxFusedRows > 3) {
    if (pass.rows == 4) return ScoreFusedRows<4>(pass, keys, group_bytes, prefetch);
  }
  if constexpr (kMaxFusedRows > 2) {
    if (pass.rows == 3) return ScoreFusedRows<3>(pass, keys, group_bytes, prefetch);
  }
  if (pass.rows == 2) return ScoreFusedRows<2>(pass, keys, group_bytes, prefetch);
  ScoreFusedRows<1>(pass, keys, group_bytes, prefetch);
}

// Scores keys of kBits bits on average, whose levels are multiplied as a Decoder's codes. make_keys(): the unit's
// decoder.
template <int kBits, class Decoder, class MakeKeys>
KVANTA_INLINE void ScoreTrellisKeys(const KeyPass& pass, MakeKeys make_keys) {
  const int64_t group_bytes = int64_t{2} * kBits * pass.cell.head_dim;
  if constexpr (kMaxFusedRows > 0) {
    if (Fuses(pass.rows, pass.workspace_use)) return ScoreFused(pass, make_keys(), group_bytes);
  }
  uint8_t* bytes = pass.workspace + kCallWorkspaceBytes;
  if (pass.workspace_use != WorkspaceUse::kReuse) {
    const auto keys = make_keys();
    for (int group = 0; group < pass.groups; ++group) {
      keys.Unpack(pass.cell.codes + group * group_bytes, bytes + int64_t{group} * 16 * pass.cell.head_dim);
    }
  }
  KeyPass decoded = pass;
  decoded.cell.codes = bytes;
  Score<Decoder>(decoded);
}

template <int kBits>
void ScoreTrellis(const KeyPass& pass) {
  ScoreTrellisKeys<kBits, CodeInt8x8>(pass, [&] { return TrellisKeys<kBits>{pass.cell.head_dim}; });
}

// ---- values

// Accumulates values at `codes` with `bits` bits each.
template <formats::ElementType kElementType, class Values>
KVANTA_INLINE void AccumulateByteProbs(const ValuePass& pass, const uint8_t* codes, int bits) {
  const int head_dim = pass.cell.head_dim;
  Prefetcher prefetch{pass.prefetch, AddSteps<Values>(pass, (pass.end - pass.begin) / (Values::kSub * kLinesOfStep))};
  ValuePass part = pass;
  ScaledProbs probs;
  for (; part.begin < pass.end; part.begin = part.end) {
    part.end = EndOfScale<kElementType>(part.begin, pass.end);
    ScaleProbs<CodeInt8x8Values>(part, probs);
    const int first = part.begin / 4 * 4, last = static_cast<int>(RoundUp(part.end, 4));
    AddTokenRange<Values>(
        pass, probs,
        {codes + int64_t{first} * head_dim * bits / 8, first, (last - first) / 4, part.begin == pass.begin}, prefetch);
  }
}

template <formats::ElementType kElementType>
void AccumulateTrellis(const ValuePass& pass) {
  constexpr int kBits = formats::CodeBits(kElementType);
  using Values = TrellisValues<kBits>;
  if constexpr (kMaxFusedRows > 0) {
    if (Fuses(pass.rows, pass.workspace_use)) {
      return AccumulateByteProbs<kElementType, Values>(pass, pass.cell.codes, kBits);
    }
  }
  uint8_t* bytes = pass.workspace + kCallWorkspaceBytes + kReusedCodeBytes;
  if (pass.workspace_use != WorkspaceUse::kReuse) {
    Values::Unpack(pass.cell.codes, pass.cell.head_dim, pass.begin / 4, (pass.end + 3) / 4, bytes);
  }
  AccumulateByteProbs<kElementType, CodeInt8x8Values>(pass, bytes, 8);
}

}  // namespace
}  // namespace kvanta::kernels
