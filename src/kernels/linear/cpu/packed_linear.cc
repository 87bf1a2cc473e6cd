#include "kernels/linear/cpu/packed_linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/math.h"
#include "kernels/cpu/task_split.h"

namespace kvanta::kernels {
namespace {

// Several tasks per thread, and a limit of the weights per task, so that a preempted thread does not delay the others.
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kMaxTaskBytes = 512 << 10;
// But not fewer panels than this for their sake: each task reads all of x.
constexpr int64_t kMinTaskPanels = 8;

// Bytes that WeightMemory allocates at a time, and the range of sizes that it serves: larger layers fill huge pages
// alone, and the smallest ones, of tiny models, are not worth one.
constexpr size_t kPieceBytes = size_t{16} << 20;
constexpr size_t kMaxPart = size_t{4} << 20;
constexpr size_t kMinPart = size_t{64} << 10;
constexpr int64_t kPartAlignment = 64;

}  // namespace

Buffer WeightMemory::Take(size_t bytes) {
  if (bytes < kMinPart || bytes > kMaxPart) return Cpu().Allocate(bytes);
  if (used_ + bytes > piece_.bytes()) {
    piece_ = Cpu().Allocate(kPieceBytes);
    used_ = 0;
  }
  Buffer part = piece_.Part(used_, bytes);
  used_ += static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), kPartAlignment));
  return part;
}

PackedLinear::PackedLinear(std::shared_ptr<LinearContext> context, const WeightKernels& kernels,
                           std::span<const weights::WeightView> stacked, std::span<const float> bias)
    : context_(std::move(context)), kernels_(kernels) {
  weights::CheckWeights(stacked, bias);
  in_ = stacked.front().in;
  for (const weights::WeightView& view : stacked) out_ += view.out;
  panels_ = CeilDiv(out_, kPanelColumns);
  steps_ = StepBlocks::Of(CeilDiv(in_, kernels_.step_k), kernels_.block_steps);
  panel_bytes_ = steps_.steps * kernels_.panel_step_bytes;
  weights_ = context_->weights.Take(static_cast<size_t>(panels_ * panel_bytes_));
  if (!bias.empty()) {
    bias_ = Cpu().Allocate(bias.size_bytes());
    std::memcpy(bias_.data(), bias.data(), bias.size_bytes());
  }
  const auto x_bytes = static_cast<size_t>(steps_.blocks * kernels_.block_rows * kernels_.x_stride);
  if (context_->packed_x.bytes() < x_bytes) context_->packed_x = Cpu().Allocate(x_bytes);
  const auto argmax_bytes = static_cast<size_t>(Tasks(kernels_.block_rows) * kernels_.block_rows) * sizeof(float);
  if (context_->task_argmaxes.bytes() < argmax_bytes) context_->task_argmaxes = Cpu().Allocate(argmax_bytes);
}

void PackedLinear::Forward(const float* x, int64_t rows, float* y, int64_t y_stride,
                           RowArgmax* argmaxes) const noexcept {
  // Even blocks: a small rest would wait for the weights.
  const int64_t blocks = CeilDiv(rows, kernels_.block_rows);
  for (int64_t block = 0, row = 0, end = 0; block < blocks; ++block, row = end) {
    end = (block + 1) * rows / blocks;
    MultiplyBlock(x + row * in_, end - row, y + row * y_stride, y_stride, argmaxes ? argmaxes + row : nullptr);
  }
}

// Number of tasks of a product of `rows` rows; at most that of a whole block.
int64_t PackedLinear::Tasks(int64_t rows) const noexcept {
  const int64_t by_threads = std::min(context_->threads->Threads() * kTasksPerThread, rows * in_ * out_ / kMinTaskMacs);
  const int64_t by_bytes = std::min(CeilDiv(panels_ * panel_bytes_, kMaxTaskBytes), panels_ / kMinTaskPanels);
  return std::clamp<int64_t>(std::max(by_threads, by_bytes), 1, CeilDiv(panels_, kernels_.tile_panels));
}

// First panel of a task: whole register tiles.
int64_t PackedLinear::FirstPanel(int64_t task, int64_t tasks) const noexcept {
  return std::min(panels_, task * CeilDiv(panels_, kernels_.tile_panels) / tasks * kernels_.tile_panels);
}

void PackedLinear::PackRows(const float* x, int64_t rows, int64_t first_row, int64_t end_row,
                            uint8_t* packed_x) const noexcept {
  kernels_.pack({.x = x,
                 .rows = rows,
                 .k = in_,
                 .first_row = first_row,
                 .end_row = end_row,
                 .steps = steps_,
                 .order = order_.empty() ? nullptr : order_.data(),
                 .out = packed_x});
}

void PackedLinear::Multiply(const uint8_t* packed_x, int64_t rows, int64_t task, int64_t tasks, float* y,
                            int64_t y_stride) const noexcept {
  kernels_.multiply({.x = packed_x,
                     .rows = rows,
                     .w = weights_.data(),
                     .first_panel = FirstPanel(task, tasks),
                     .end_panel = FirstPanel(task + 1, tasks),
                     .steps = steps_,
                     .out = out_,
                     .bias = bias_ ? bias_.as<float>() : nullptr,
                     .y = y,
                     .y_stride = y_stride});
}

void PackedLinear::MultiplyBlock(const float* x, int64_t rows, float* y, int64_t y_stride,
                                 RowArgmax* argmaxes) const noexcept {
  ThreadPool& threads = *context_->threads;
  uint8_t* packed_x = context_->packed_x.data();

  ForParts(threads, rows, in_, [&](int64_t first, int64_t end) { PackRows(x, rows, first, end, packed_x); });

  const int64_t tasks = Tasks(rows);
  float* task_argmaxes = context_->task_argmaxes.as<float>();
  const auto first_column = [&](int64_t task) { return std::min(out_, FirstPanel(task, tasks) * kPanelColumns); };
  auto multiply = [&](int64_t task, int) {
    Multiply(packed_x, rows, task, tasks, y, y_stride);
    const int64_t first = first_column(task), end = first_column(task + 1);
    for (int64_t row = 0; argmaxes && row < rows; ++row) {
      task_argmaxes[task * rows + row] = context_->isa.rows.max(y + row * y_stride + first, end - first);
    }
  };
  threads.ForEach(tasks, multiply);
  for (int64_t row = 0; argmaxes && row < rows; ++row) {
    const auto max = [&](int64_t task) { return task_argmaxes[task * rows + row]; };
    int64_t best = 0;
    bool finite = true;
    for (int64_t task = 0; task < tasks; ++task) {
      finite = finite && std::isfinite(max(task));
      if (max(task) > max(best)) best = task;
    }
    const float* found = y + row * y_stride + first_column(best);
    while (finite && *found != max(best)) ++found;
    argmaxes[row] = {max(best), static_cast<int32_t>(found - (y + row * y_stride)), finite};
  }
}

}  // namespace kvanta::kernels
