// Trellis codes in plain C++, for any CPU.
#pragma once

#include "formats/trellis.h"
#include "kernels/attention/cpu/trellis_unpack.h"

namespace kvanta::kernels {
namespace {

constexpr formats::TrellisSearch kTrellisSearch = formats::PortableTrellisSearch;

}  // namespace
}  // namespace kvanta::kernels
