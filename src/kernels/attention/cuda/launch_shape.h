// How a kernel is launched.
#pragma once

#include <cstdint>

namespace kvanta::kernels::cuda {

struct LaunchShape {
  int64_t blocks = 0;
  int threads = 0;
  int shared_bytes = 0;
};

}  // namespace kvanta::kernels::cuda
