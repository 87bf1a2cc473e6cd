// The CPU's ops over a given ISA unit (tests hand in units that the machine would not choose).
#pragma once

#include <memory>

#include "kernels/cpu/isa_table.h"
#include "kernels/ops.h"

namespace kvanta::kernels {

// threads: at least one pool, shared with the caller. `isa` must outlive the ops and run on this machine.
std::unique_ptr<Ops> MakeCpuOps(std::shared_ptr<ThreadPool> threads, const IsaTable& isa);

}  // namespace kvanta::kernels
