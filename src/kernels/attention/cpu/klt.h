// Keys with uneven bits (formats/klt.h), decoded to int8 as trellis codes are. Included by isa_<isa>.cc after its
// KltKeys.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/trellis.h"

namespace kvanta::kernels {
namespace {

template <int kBits>
void ScoreKlt(const KeyPass& pass) {
  const formats::BitAllocation* allocation = pass.allocation;
  std::optional<formats::BitAllocation> uncalibrated;
  if (allocation == nullptr && pass.workspace_use != WorkspaceUse::kReuse) {
    allocation = &uncalibrated.emplace(formats::DefaultAllocation(pass.cell.head_dim, kBits));
  }
  ScoreTrellisKeys<kBits, CodeInt8>(pass, [&] { return KltKeys{*allocation}; });
}

}  // namespace
}  // namespace kvanta::kernels
