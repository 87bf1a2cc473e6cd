#include "kernels/moe/cpu/cpu_experts.h"

#include <algorithm>
#include <utility>

#include "kernels/linear/cpu/linear_batch.h"
#include "kernels/moe/cpu/expert_router.h"

namespace kvanta::kernels {
namespace {

// Rows that are routed and grouped together, and rows of experts that are computed together. Neither affects results.
constexpr int64_t kMaxRoutedRows = 1024;
constexpr int64_t kMaxExpertRows = 256;
// A parallel region costs a few microseconds: smaller work is not split.
constexpr int64_t kMinExpertTaskValues = 1 << 14;
constexpr int64_t kLineFloats = 16;  // of a cache line

// One expert of one row.
struct ExpertRow {
  int32_t row = 0;
  int32_t expert = 0;
  float weight = 0;
};

class CpuExperts final : public ExpertLayer {
 public:
  CpuExperts(std::shared_ptr<LinearContext> context, std::vector<ExpertWeights> experts, const MoeConfig& moe,
             std::span<const float> e_score_correction_bias)
      : context_(std::move(context)),
        experts_(std::move(experts)),
        moe_(moe),
        hidden_(experts_.front().down->Out()),
        width_(experts_.front().down->In()),
        activate_mul_(context_->isa.rows.ActivateMul(moe.activation)),
        router_(moe, e_score_correction_bias) {
    const int64_t expert_rows = kMaxExpertRows * (hidden_ + 3 * width_);
    const auto bytes = static_cast<size_t>(expert_rows) * sizeof(float);
    if (context_->expert_rows.bytes() < bytes) context_->expert_rows = Cpu().Allocate(bytes);
    const auto entries = static_cast<size_t>(kMaxRoutedRows * moe.num_experts_per_tok);
    row_experts_.resize(entries);
    row_weights_.resize(entries);
    entries_.resize(entries);
    first_entry_.resize(experts_.size() + 1);
    products_.reserve(experts_.size());
  }

  void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept override {
    for (int64_t row = 0; row < rows; row += kMaxRoutedRows) {
      ForwardRows(x + row * hidden_, logits + row * moe_.num_experts, std::min(kMaxRoutedRows, rows - row),
                  out + row * hidden_);
    }
  }

 private:
  void ForwardRows(const float* x, const float* logits, int64_t rows, float* out) noexcept {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = row * moe_.num_experts_per_tok;
      router_.Route(logits + row * moe_.num_experts, row_experts_.data() + first, row_weights_.data() + first);
    }
    const int64_t entries = GroupByExpert(rows);
    std::fill_n(out, rows * hidden_, 0.0F);
    for (int64_t first = 0; first < entries; first += kMaxExpertRows) {
      const auto count = static_cast<size_t>(std::min(kMaxExpertRows, entries - first));
      AddExperts({entries_.data() + first, count}, x, rows, out);
    }
  }

  // Fills entries_ in ascending order of experts, and of rows for each; returns their number. Experts of weight 0,
  // which add nothing, have none.
  int64_t GroupByExpert(int64_t rows) noexcept {
    const auto pairs = static_cast<size_t>(rows * moe_.num_experts_per_tok);
    std::fill(first_entry_.begin(), first_entry_.end(), 0);
    for (size_t i = 0; i < pairs; ++i) {
      if (row_weights_[i] != 0) ++first_entry_[static_cast<size_t>(row_experts_[i]) + 1];
    }
    for (size_t expert = 0; expert < experts_.size(); ++expert) first_entry_[expert + 1] += first_entry_[expert];
    const int64_t count = first_entry_.back();
    for (size_t i = 0; i < pairs; ++i) {
      if (row_weights_[i] == 0) continue;
      const auto row = static_cast<int32_t>(i / static_cast<size_t>(moe_.num_experts_per_tok));
      const int32_t expert = row_experts_[i];
      entries_[static_cast<size_t>(first_entry_[static_cast<size_t>(expert)]++)] = {row, expert, row_weights_[i]};
    }
    return count;
  }

  // out += the experts' outputs for the rows of `entries`, at most kMaxExpertRows.
  void AddExperts(std::span<const ExpertRow> entries, const float* x, int64_t rows, float* out) noexcept {
    const auto count = static_cast<int64_t>(entries.size());
    float* expert_rows = context_->expert_rows.as<float>();  // input, later output
    float* gate_up = expert_rows + kMaxExpertRows * hidden_;
    float* gated = gate_up + kMaxExpertRows * 2 * width_;
    const bool reads_x = rows == 1 && !moe_.apply_router_weight_on_input;  // one row, the input of all its experts
    if (!reads_x) Gather(entries, x, expert_rows);
    Multiply(entries, &ExpertWeights::gate_up, reads_x ? x : expert_rows, reads_x ? 0 : hidden_, gate_up, 2 * width_);
    ForParts(count, width_, [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) {
        const float* gate = gate_up + i * 2 * width_;
        activate_mul_(gate, gate + width_, width_, gated + i * width_);
      }
    });
    Multiply(entries, &ExpertWeights::down, gated, width_, expert_rows, hidden_);
    Combine(entries, expert_rows, out);
  }

  void Gather(std::span<const ExpertRow> entries, const float* x, float* expert_rows) noexcept {
    ForParts(std::ssize(entries), hidden_, [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) {
        const ExpertRow& entry = entries[static_cast<size_t>(i)];
        std::copy_n(x + entry.row * hidden_, hidden_, expert_rows + i * hidden_);
        if (moe_.apply_router_weight_on_input) {
          context_->isa.rows.scale(expert_rows + i * hidden_, entry.weight, hidden_);
        }
      }
    });
  }

  // y: the products of each entry's row of x with its expert. x_stride 0: all entries have the same row.
  void Multiply(std::span<const ExpertRow> entries, std::unique_ptr<Linear> ExpertWeights::*layer, const float* x,
                int64_t x_stride, float* y, int64_t y_stride) noexcept {
    products_.clear();
    for (size_t first = 0; first < entries.size();) {
      size_t end = first + 1;
      while (end < entries.size() && entries[end].expert == entries[first].expert) ++end;
      const Linear& linear = *(experts_[static_cast<size_t>(entries[first].expert)].*layer);
      const LinearProduct product{.layer = dynamic_cast<const PackedLinear*>(&linear),
                                  .x = x + static_cast<int64_t>(first) * x_stride,
                                  .rows = static_cast<int64_t>(end - first),
                                  .y = y + static_cast<int64_t>(first) * y_stride};
      if (product.layer != nullptr) {
        products_.push_back(product);
      } else {  // matrices of different storages
        linear.Forward(product.x, product.rows, product.y, linear.Out());
      }
      first = end;
    }
    ForwardBatch(products_);
  }

  // Adds the entries in their order, so that a row's experts are summed in ascending order. Threads divide the
  // channels.
  void Combine(std::span<const ExpertRow> entries, const float* expert_rows, float* out) noexcept {
    const int64_t lines = CeilDiv(hidden_, kLineFloats);
    ForParts(lines, kLineFloats * std::ssize(entries), [&](int64_t first_line, int64_t end_line) {
      const int64_t first = first_line * kLineFloats, end = std::min(hidden_, end_line * kLineFloats);
      for (size_t i = 0; i < entries.size(); ++i) {
        const float weight = moe_.apply_router_weight_on_input ? 1.0F : entries[i].weight;
        context_->isa.rows.add_scaled(out + entries[i].row * hidden_ + first,
                                      expert_rows + static_cast<int64_t>(i) * hidden_ + first, weight, end - first);
      }
    });
  }

  // Calls fn(first, end) for parts of `count` items of `size` values, in parallel where it pays.
  template <class Function>
  void ForParts(int64_t count, int64_t size, Function fn) noexcept {
    const int64_t tasks = std::clamp<int64_t>(count * size / kMinExpertTaskValues, 1, count);
    auto run = [&](int64_t task, int) { fn(task * count / tasks, (task + 1) * count / tasks); };
    context_->threads->ForEach(tasks, run);
  }

  std::shared_ptr<LinearContext> context_;
  const std::vector<ExpertWeights> experts_;
  const MoeConfig moe_;
  const int64_t hidden_;
  const int64_t width_;  // of an expert
  const ActivateMulKernel activate_mul_;
  ExpertRouter router_;
  // Experts of a group of rows: [rows][num_experts_per_tok], then ordered by expert.
  std::vector<int32_t> row_experts_;
  std::vector<float> row_weights_;
  std::vector<ExpertRow> entries_;
  std::vector<int64_t> first_entry_;  // [experts + 1]
  std::vector<LinearProduct> products_;
};

}  // namespace

std::unique_ptr<ExpertLayer> MakeCpuExperts(std::shared_ptr<LinearContext> context, std::vector<ExpertWeights> experts,
                                            const MoeConfig& moe, std::span<const float> e_score_correction_bias) {
  return std::make_unique<CpuExperts>(std::move(context), std::move(experts), moe, e_score_correction_bias);
}

}  // namespace kvanta::kernels
