// A linear layer on a GPU: W is put into panels here and copied there once (weight_places.h).
#pragma once

#include <memory>
#include <span>

#include "base/thread_pool.h"
#include "kernels/cuda/gpu.h"
#include "kernels/linear.h"

namespace kvanta::kernels {

// Shared by the layers of one Ops, whose launches follow each other.
struct GpuLinearContext {
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<ThreadPool> threads;  // pack weights
  // Large enough for every layer: Multiply allocates nothing. As cuda::PackedRows.
  Buffer codes = {}, unit_sums = {}, factors = {};
};

class GpuLinear final : public Linear {
 public:
  // Throws InputError, ResourceError.
  GpuLinear(std::shared_ptr<GpuLinearContext> context, std::span<const WeightView> stacked, std::span<const float> bias,
            LinearKind kind);

  int64_t In() const noexcept override { return weight_.in; }
  int64_t Out() const noexcept override { return weight_.out; }
  void Multiply(const float* x, int64_t rows, float* y, int64_t y_stride, RowPeak* peaks) const noexcept override;
  void ReadRow(int64_t index, float* out) const noexcept override;
  int64_t WeightBytes() const noexcept override { return weight_bytes_; }
  std::string_view Kind() const noexcept override;

  const cuda::Weight& weight() const noexcept { return weight_; }

 private:
  void PackPlain(std::span<const WeightView> stacked);
  void PackPanels(std::span<const WeightView> stacked);
  void ReserveRows();
  cuda::ProductTile TileFor(int64_t rows) const noexcept;

  std::shared_ptr<GpuLinearContext> context_;
  cuda::Weight weight_;
  int64_t weight_bytes_ = 0;
  Buffer data_, bias_;
};

}  // namespace kvanta::kernels
