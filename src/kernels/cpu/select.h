// Selects the ISA unit: by name, by the environment, or the best that this CPU and its operating system support.
#pragma once

#include <string_view>

#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

// isa: one of RunnableIsas(), or "auto": KVANTA_ISA if set and not empty, else the best. Throws InputError that lists
// the units this machine runs.
const IsaTable& SelectIsa(std::string_view isa = "auto");

}  // namespace kvanta::kernels
