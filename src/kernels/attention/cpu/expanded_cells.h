// Attention kernels over cells whose codes are expanded to wider ones (Decoder::Expanded) once for several calls.
// Results have the bits of the kernels over the codes. Included by isa_<isa>.cc after values.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/values.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// True if calls over a cell share its expanded codes. A single call would gain less than the expansion costs.
KVANTA_INLINE bool SharesExpandedCodes(const CellView& cell, WorkspaceUse use) {
  return use != WorkspaceUse::kNone && cell.head_dim % 16 == 0 &&
         int64_t{4} * cell.page_tokens * cell.head_dim <= kReusedCodeBytes;
}

// Lines of expanded codes per line of codes.
template <class Decoder>
inline constexpr int kExpansion = Decoder::kSub / Decoder::Expanded::kSub;

// Scores over the order of keys with fewer elements per word.
template <class Decoder>
void ScoreSharedCells(const KeyPass& pass) {
  if (!SharesExpandedCodes(pass.cell, pass.workspace_use)) return Score<Decoder>(pass);
  uint8_t* const out = pass.workspace + kCallWorkspaceBytes;
  const int64_t lines = int64_t{pass.groups} * pass.cell.head_dim / Decoder::kSub;
  for (int64_t line = 0; pass.workspace_use == WorkspaceUse::kFill && line < lines; ++line) {
    Decoder::Expand(pass.cell.codes + line * 64, 1, out + line * (kExpansion<Decoder> * 64), 64);
  }
  KeyPass expanded = pass;
  expanded.cell.codes = out;
  Score<typename Decoder::Expanded>(expanded);
}

// Accumulates over the order of values with fewer elements per word.
template <class Decoder>
void AccumulateSharedCells(const ValuePass& pass) {
  const CellView& cell = pass.cell;
  // Words of which the range has a part of the tokens are masked and added apart, in another order of sums.
  const bool has_whole_words = pass.begin % Decoder::kSub == 0 && pass.end % Decoder::kSub == 0;
  if (!has_whole_words || !SharesExpandedCodes(cell, pass.workspace_use)) return Accumulate<Decoder>(pass);
  uint8_t* const out = pass.workspace + kCallWorkspaceBytes + kReusedCodeBytes;
  const int64_t row_bytes = int64_t{4} * cell.head_dim;
  for (int t = pass.begin; pass.workspace_use == WorkspaceUse::kFill && t < pass.end; t += Decoder::kSub) {
    Decoder::Expand(cell.codes + t / Decoder::kSub * row_bytes, cell.head_dim / 16,
                    out + t / Decoder::Expanded::kSub * row_bytes, row_bytes);
  }
  ValuePass expanded = pass;
  expanded.cell.codes = out;
  Accumulate<typename Decoder::Expanded>(expanded);
}

}  // namespace
}  // namespace kvanta::kernels
