// Mamba-2 on the CPU: token after token, so that a row's bits do not depend on chunks. Rows of the convolution are
// split by channels, states by heads and channels, whose blocks stay in the first-level cache over all tokens.
#pragma once

#include "base/thread_pool.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear_attention/mamba2.h"

namespace kvanta::kernels {

void CpuMamba2(const Mamba2Op& op, const IsaTable& isa, ThreadPool& threads) noexcept;

}  // namespace kvanta::kernels
