// Common part of the storages of W: packing into panels, and the split of a product over rows, columns and threads.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/device.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/linear.h"
#include "weights/quantized_weight.h"

namespace kvanta::kernels {

// Rows of packed x are a multiple of this in memory.
inline constexpr int64_t kPackedRowMultiple = 16;

// Allocates weights of consecutive layers from large pieces: a layer of a small model alone would not fill a huge page,
// and TLB misses would cost part of the bandwidth.
class WeightMemory {
 public:
  // Zeroed, 64-byte aligned. Throws ResourceError.
  Buffer Take(size_t bytes);

 private:
  Buffer piece_;
  size_t used_ = 0;
};

// State shared by the layers of one Ops, which run one after the other.
struct LinearContext {
  const IsaTable& isa;
  std::shared_ptr<ThreadPool> threads;
  Buffer packed_x = {};       // large enough for every layer: Forward allocates nothing
  Buffer task_argmaxes = {};  // likewise, f32 [tasks][rows of a block]
  Buffer expert_rows = {};    // likewise, activations of a layer of experts (moe/cpu/cpu_experts.h)
  WeightMemory weights = {};
};

class PackedLinear : public Linear {
 public:
  int64_t In() const noexcept override { return in_; }
  int64_t Out() const noexcept override { return out_; }
  int64_t WeightBytes() const noexcept override { return panels_ * panel_bytes_; }
  int64_t BlockRows() const noexcept override { return kernels_.block_rows; }  // also the maximum of a product in parts
  void Forward(const float* x, int64_t rows, float* y, int64_t y_stride, RowArgmax* argmaxes) const noexcept override;

  // Parts of Forward, for products of several layers in one parallel region (linear_batch.h).
  LinearContext& Context() const noexcept { return *context_; }
  // Kernels may store and read rows in whole tiles.
  int64_t PackedBytes(int64_t rows) const noexcept {
    return steps_.blocks * RoundUp(rows, kPackedRowMultiple) * kernels_.x_stride;
  }
  void PackRows(const float* x, int64_t rows, int64_t first_row, int64_t end_row, uint8_t* packed_x) const noexcept;
  // True if both multiply the same packed rows.
  bool SharesPackedRows(const PackedLinear& other) const noexcept {
    return kernels_.pack == other.kernels_.pack && kernels_.block_steps == other.kernels_.block_steps &&
           in_ == other.in_ && order_ == other.order_;
  }
  int64_t Tasks(int64_t rows) const noexcept;
  void Multiply(const uint8_t* packed_x, int64_t rows, int64_t task, int64_t tasks, float* y,
                int64_t y_stride) const noexcept;

 protected:
  // Checks the shapes and allocates; the derived constructor packs. Throws InputError, ResourceError.
  PackedLinear(std::shared_ptr<LinearContext> context, const WeightKernels& kernels,
               std::span<const weights::WeightView> stacked, std::span<const float> bias);

  // Calls pack(column of the panel, f32 row [in], panel's bytes) for every row of the stacked W, panels in parallel.
  template <class PackColumn>
  void PackColumns(std::span<const weights::WeightView> stacked, PackColumn pack);
  // Likewise pack(column of the panel, view, row of it, buffer for f32 [in], panel's bytes).
  template <class PackRow>
  void PackWeightRows(std::span<const weights::WeightView> stacked, PackRow pack);

  // Calls pack(row of W, column of the panel, panel's bytes) for every row, panels in parallel.
  template <class PackIndex>
  void PackIndices(PackIndex pack);
  // Sets the order of columns in which W was packed: k is column order[k] of x.
  void SetOrder(std::span<const int32_t> order) { order_.assign(order.begin(), order.end()); }
  std::span<const int32_t> Order() const noexcept { return order_; }

  int64_t Steps() const noexcept { return steps_.steps; }
  const uint8_t* Panel(int64_t panel) const noexcept { return weights_.data() + panel * panel_bytes_; }

 private:
  int64_t FirstPanel(int64_t task, int64_t tasks) const noexcept;
  void MultiplyBlock(const float* x, int64_t rows, float* y, int64_t y_stride, RowArgmax* argmaxes) const noexcept;

  std::shared_ptr<LinearContext> context_;
  const WeightKernels& kernels_;
  int64_t in_ = 0;
  int64_t out_ = 0;
  int64_t panels_ = 0;
  StepBlocks steps_;
  int64_t panel_bytes_ = 0;
  Buffer weights_;
  Buffer bias_;                 // f32 [out], or none
  std::vector<int32_t> order_;  // [in], or none
};

std::unique_ptr<Linear> MakeBf16Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias);
std::unique_ptr<Linear> MakeF32Linear(const std::shared_ptr<LinearContext>& context,
                                      std::span<const weights::WeightView> stacked, std::span<const float> bias);
std::unique_ptr<Linear> MakeF16Linear(const std::shared_ptr<LinearContext>& context,
                                      std::span<const weights::WeightView> stacked, std::span<const float> bias);
std::unique_ptr<Linear> MakeInt8Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                       bool int16_activations);
std::unique_ptr<Linear> MakeInt4Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                       bool int16_activations);

// Keeps the views' blocks; all have one format.
std::unique_ptr<Linear> MakeBlockLinear(const std::shared_ptr<LinearContext>& context,
                                        std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                        bool int16_activations);
// Keeps what the views store: blocks of any formats, and elements of any types, of which each run of equal ones is a
// matrix of its own.
std::unique_ptr<Linear> MakeStoredLinear(const std::shared_ptr<LinearContext>& context,
                                         std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                         bool int16_activations);
// Null where no kernel reads the weights' format, or they differ in it or in the order of columns.
std::unique_ptr<Linear> MakeQuantizedLinear(const std::shared_ptr<LinearContext>& context,
                                            std::span<const weights::QuantizedView> stacked,
                                            std::span<const float> bias);

template <class PackIndex>
void PackedLinear::PackIndices(PackIndex pack) {
  auto pack_panel = [&](int64_t panel, int) {
    for (int column = 0; column < kPanelColumns; ++column) {
      const int64_t index = panel * kPanelColumns + column;
      if (index < out_) pack(index, column, weights_.data() + panel * panel_bytes_);
    }
  };
  context_->threads->ForEach(panels_, pack_panel);
}

template <class PackRow>
void PackedLinear::PackWeightRows(std::span<const weights::WeightView> stacked, PackRow pack) {
  const auto threads = static_cast<size_t>(context_->threads->Threads());
  const auto rows = std::make_unique<float[]>(threads * static_cast<size_t>(in_));
  auto pack_panel = [&](int64_t panel, int worker) {
    float* row = rows.get() + worker * in_;
    for (int column = 0; column < kPanelColumns; ++column) {
      int64_t index = panel * kPanelColumns + column;
      if (index >= out_) break;
      size_t view = 0;
      for (; index >= stacked[view].out; ++view) index -= stacked[view].out;
      pack(column, stacked[view], index, row, weights_.data() + panel * panel_bytes_);
    }
  };
  context_->threads->ForEach(panels_, pack_panel);
}

template <class PackColumn>
void PackedLinear::PackColumns(std::span<const weights::WeightView> stacked, PackColumn pack) {
  PackWeightRows(stacked, [&](int column, const weights::WeightView& view, int64_t index, float* row, uint8_t* panel) {
    weights::ReadWeightRow(view, index, row);
    pack(column, row, panel);
  });
}

}  // namespace kvanta::kernels
