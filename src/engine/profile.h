// Where the time of steps goes, by operation. Decorators around the model's operations and the attention backend, which
// exist only while a profile is wanted: without one nothing is measured and nothing is called twice.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/backend.h"
#include "kernels/ops.h"
#include "kvanta/engine.h"

namespace kvanta::engine {

// Rows in the order of their first use. One thread at a time, as everything that has the engine's turn.
class StepProfile {
 public:
  // The row of that name; stays where it is.
  ProfileRow& Row(std::string_view name);
  std::vector<ProfileRow> Rows() const { return {rows_.begin(), rows_.end()}; }

 private:
  std::deque<ProfileRow> rows_;
};

// Both keep `profile`, which must not be null.
std::unique_ptr<kernels::Ops> Profiled(std::unique_ptr<kernels::Ops> ops, std::shared_ptr<StepProfile> profile);
std::unique_ptr<attention::Backend> Profiled(std::unique_ptr<attention::Backend> backend,
                                             std::shared_ptr<StepProfile> profile);

}  // namespace kvanta::engine
