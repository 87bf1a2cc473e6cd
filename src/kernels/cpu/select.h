// Chooses the ISA unit: by name, by the environment, or the best this CPU and its operating system can run.
#pragma once

#include <string_view>

#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

// isa: a name of RunnableIsas(), or "auto": KVANTA_ISA if set and not empty, else the best. Throws InputError listing
// the units that this machine runs.
const IsaTable& SelectIsa(std::string_view isa = "auto");

}  // namespace kvanta::kernels
