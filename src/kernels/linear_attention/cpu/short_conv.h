// Gated short convolution on the CPU: tasks are sequences and channels, over all tokens.
#pragma once

#include "base/thread_pool.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear_attention/short_conv.h"

namespace kvanta::kernels {

void CpuShortConv(const ShortConvOp& op, const IsaTable& isa, ThreadPool& threads) noexcept;

}  // namespace kvanta::kernels
