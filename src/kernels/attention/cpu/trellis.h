// Trellis codes (formats/trellis.h): a page is decoded to int8 in the workspace, once for all rows that read it, then
// the int8 kernels run over it. Included by isa_<isa>.cc after its TrellisCodes and values.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/values.h"

namespace kvanta::kernels {
namespace {

// Keys of kBits bits on average. unpack(codes of a group of 16 tokens, bytes) decodes a group to the order of int8
// keys.
template <int kBits, class Unpack>
KVANTA_INLINE void ScoreUnpacked(const KeyPass& pass, Unpack unpack) {
  uint8_t* bytes = pass.workspace + kCallWorkspaceBytes;
  const int head_dim = pass.cell.head_dim;
  if (pass.workspace_use != WorkspaceUse::kReuse) {
    for (int group = 0; group < pass.groups; ++group) {
      unpack(pass.cell.codes + int64_t{group} * 2 * kBits * head_dim, bytes + int64_t{group} * 16 * head_dim);
    }
  }
  KeyPass decoded = pass;
  decoded.cell.codes = bytes;
  Score<CodeInt8>(decoded);
}

template <int kBits>
void ScoreTrellis(const KeyPass& pass) {
  ScoreUnpacked<kBits>(pass, [&](const uint8_t* codes, uint8_t* bytes) {
    TrellisCodes<kBits>::UnpackKeys(codes, pass.cell.head_dim, bytes);
  });
}

template <int kBits>
void AccumulateTrellis(const ValuePass& pass) {
  uint8_t* bytes = pass.workspace + kCallWorkspaceBytes + kReusedCodeBytes;
  if (pass.workspace_use != WorkspaceUse::kReuse) {
    TrellisCodes<kBits>::UnpackValues(pass.cell.codes, pass.cell.head_dim, pass.begin / 4, (pass.end + 3) / 4, bytes);
  }
  ValuePass decoded = pass;
  decoded.cell.codes = bytes;
  Accumulate<CodeInt8Values>(decoded);
}

}  // namespace
}  // namespace kvanta::kernels
