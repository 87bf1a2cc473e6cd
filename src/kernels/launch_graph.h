// Launches on a GPU that were recorded once, to be begun again by a single call.
#pragma once

namespace kvanta::kernels {

class LaunchGraph {
 public:
  virtual ~LaunchGraph() = default;
  // All of them, in their order, after what began before: with the arguments that they were recorded with, on what the
  // memory holds now. Errors are kept, as those of launches are.
  virtual void Run() noexcept = 0;
};

}  // namespace kvanta::kernels
