// Time of steps by operation, measured by decorators around the model's operations and the attention backend. Without
// a profile there are no decorators, and no cost.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/backend.h"
#include "kernels/ops.h"
#include "kvanta/stats.h"

namespace kvanta::observe {

// Rows in the order of their first use. Not thread-safe: guarded by the engine's step lock.
class StepProfile {
 public:
  // Finds or adds the row of that name. References stay valid.
  ProfileRow& Row(std::string_view name);
  std::vector<ProfileRow> Rows() const { return {rows_.begin(), rows_.end()}; }

 private:
  std::deque<ProfileRow> rows_;
};

// Both keep `profile`, which must not be null.
std::unique_ptr<kernels::Ops> Profiled(std::unique_ptr<kernels::Ops> ops, std::shared_ptr<StepProfile> profile);
std::unique_ptr<attention::Backend> Profiled(std::unique_ptr<attention::Backend> backend,
                                             std::shared_ptr<StepProfile> profile);

}  // namespace kvanta::observe
