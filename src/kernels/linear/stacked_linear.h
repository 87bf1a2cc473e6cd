// Linear layers with one input whose outputs are side by side: a stack whose weights have different storages.
#pragma once

#include <memory>
#include <vector>

#include "kernels/linear/linear.h"

namespace kvanta::kernels {

// parts: at least one, all with the same In().
std::unique_ptr<Linear> MakeStackedLinear(std::vector<std::unique_ptr<Linear>> parts);

}  // namespace kvanta::kernels
