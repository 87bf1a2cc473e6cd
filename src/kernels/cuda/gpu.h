// NVIDIA GPUs as the layers above see them: no header of CUDA is needed to use this, nor to build without.
#pragma once

#include <string>

namespace kvanta::kernels {

// The least compute capability that the kernels are compiled for, times 10: Ampere.
inline constexpr int kLeastCapability = 80;

// Why this program cannot compute on a GPU of this machine, in words ("this build is without CUDA", "no NVIDIA driver
// ..."); empty where it can. Starts no work on a GPU and keeps no memory there.
std::string MissingForCuda();

}  // namespace kvanta::kernels
