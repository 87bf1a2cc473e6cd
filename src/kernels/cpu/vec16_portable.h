// Vec16 of the portable unit.
#pragma once

#include "kernels/cpu/compiler_vec16.h"

namespace kvanta::kernels {
namespace {

using Vec16 = CompilerVec16;

}  // namespace
}  // namespace kvanta::kernels
