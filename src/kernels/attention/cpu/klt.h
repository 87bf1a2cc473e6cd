// Keys with uneven bits (formats/klt.h): a page is decoded to int8 in the workspace, once for all rows that read it,
// then the int8 kernels run over it. Included by isa_<isa>.cc after its UnpackKltKeys and keys.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::kernels {
namespace {

template <int kBits>
void ScoreKlt(const KeyPass& pass) {
  uint8_t* bytes = pass.workspace + kCallWorkspaceBytes;
  const int head_dim = pass.cell.head_dim;
  if (pass.workspace_use != WorkspaceUse::kReuse) {
    const auto unpack = [&](const formats::BitAllocation& allocation) {
      for (int group = 0; group < pass.groups; ++group) {
        UnpackKltKeys(allocation, pass.cell.codes + int64_t{group} * 2 * kBits * head_dim,
                      bytes + int64_t{group} * 16 * head_dim);
      }
    };
    pass.allocation != nullptr ? unpack(*pass.allocation) : unpack(formats::DefaultAllocation(head_dim, kBits));
  }
  KeyPass decoded = pass;
  decoded.cell.codes = bytes;
  Score<CodeInt8>(decoded);
}

}  // namespace
}  // namespace kvanta::kernels
