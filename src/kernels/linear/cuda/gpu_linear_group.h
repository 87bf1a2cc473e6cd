// Grouped GEMM: linear layers of one shape and kind in one launch, each layer with row tiles of its own.
#pragma once

#include <memory>
#include <vector>

#include "kernels/linear/cuda/gpu_linear.h"

namespace kvanta::kernels {

class GpuLinearGroup final : public LinearGroup {
 public:
  // The layers were made by `context`'s Ops. Throws ResourceError.
  GpuLinearGroup(std::shared_ptr<GpuLinearContext> context, std::vector<std::unique_ptr<Linear>> layers);

  int64_t In() const noexcept { return Weight(0).in; }
  int64_t Out() const noexcept { return Weight(0).out; }

  void Forward(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept override;

  // x: f32 [rows][In()]; y: f32 [rows][Out()]; members: layer of each row tile, or -1 to skip it.
  void Multiply(const float* x, int64_t rows, cuda::ProductTile tile, const int32_t* members, float* y) const noexcept;

 private:
  const cuda::Weight& Weight(size_t member) const noexcept {
    return static_cast<const GpuLinear&>(*layers_[member]).weight();
  }
  void ForwardUnquantized(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept;

  std::shared_ptr<GpuLinearContext> context_;
  std::vector<std::unique_ptr<Linear>> layers_;
  Buffer data_;    // pointers to each layer's W
  Buffer biases_;  // pointers to each layer's bias; empty without biases
};

}  // namespace kvanta::kernels
