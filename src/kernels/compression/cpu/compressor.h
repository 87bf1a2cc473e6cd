// Compressor of tokens on the host. A channel's arithmetic depends on its tokens alone, not on how a step divides them.
#pragma once

#include "base/thread_pool.h"
#include "kernels/compression/compressor.h"

namespace kvanta::kernels {

void Compress(const CompressorOp& op, ThreadPool& threads) noexcept;

}  // namespace kvanta::kernels
