// Keys with uneven bits in plain C++, for any CPU.
#pragma once

#include "kernels/attention/cpu/klt_unpack.h"

namespace kvanta::kernels {
namespace {

constexpr formats::KltSearch kKltSearch = formats::PortableKltSearch;

}  // namespace
}  // namespace kvanta::kernels
