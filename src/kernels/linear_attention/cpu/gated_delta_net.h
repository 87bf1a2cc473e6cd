// Gated DeltaNet on the CPU: token after token, so that a row's bits do not depend on chunks. Rows of the convolution
// are split by channels, states by heads and value channels, whose blocks stay in the first-level cache over all
// tokens.
#pragma once

#include "base/thread_pool.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear_attention/gated_delta_net.h"

namespace kvanta::kernels {

void CpuGatedDeltaNet(const GatedDeltaNetOp& op, const IsaTable& isa, ThreadPool& threads) noexcept;

}  // namespace kvanta::kernels
