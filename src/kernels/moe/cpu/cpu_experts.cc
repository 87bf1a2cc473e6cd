#include "kernels/moe/cpu/cpu_experts.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/cpu/plain_rows.h"
#include "kernels/cpu/task_split.h"
#include "kernels/linear/cpu/linear_batch.h"
#include "kernels/moe/cpu/expert_router.h"

namespace kvanta::kernels {
namespace {

// Rows that are routed and grouped together, and rows of experts that are computed together. Neither affects results.
constexpr int64_t kMaxRoutedRows = 1024;
constexpr int64_t kMaxExpertRows = 256;
constexpr int64_t kMaxSharedRows = 256;  // rows routed together by expert parallelism, which keeps all their outputs
constexpr int64_t kLineFloats = 16;      // floats per cache line

// One expert of one row.
struct ExpertRow {
  int32_t row = 0;
  int32_t expert = 0;
  float weight = 0;
};

class CpuExperts final : public ExpertLayer {
 public:
  CpuExperts(std::shared_ptr<LinearContext> context, std::vector<ExpertWeights> experts, const MoeConfig& moe,
             const RouterVectors& router, const ExpertDivision& division)
      : context_(std::move(context)),
        experts_(std::move(experts)),
        moe_(moe),
        hidden_(experts_.front().gate_up->In()),
        own_hidden_(experts_.front().down->Out()),
        width_(experts_.front().down->In()),
        own_width_(experts_.front().gate_up->Out() / (moe.gated ? 2 : 1)),
        ranks_(division.Divided() ? *division.ranks : alone_),
        by_experts_(division.Divided() && division.by_experts),
        parts_(ranks_.PartitionOf(moe.num_experts)),
        first_expert_(by_experts_ ? parts_.Begin(ranks_.Rank()) : 0),
        max_rows_(by_experts_ ? kMaxSharedRows : kMaxRoutedRows),
        activate_mul_(context_->isa.rows.ActivateMul(moe.activation)),
        router_(moe, router) {
    const auto entries = static_cast<size_t>(max_rows_ * moe.num_experts_per_tok);
    const auto bytes = static_cast<size_t>(Place(nullptr)) * sizeof(float);
    if (context_->expert_rows.bytes() < bytes) context_->expert_rows = Cpu().Allocate(bytes);
    row_experts_.resize(entries);
    row_weights_.resize(entries);
    entries_.resize(entries);
    first_entry_.resize(static_cast<size_t>(moe.num_experts) + 1);
    products_.reserve(experts_.size());
  }

  void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept override {
    Place(context_->expert_rows.as<float>());  // later layers may have replaced it by a larger one
    for (int64_t row = 0; row < rows; row += max_rows_) {
      ForwardRows(x + row * hidden_, logits + row * moe_.num_experts, std::min(max_rows_, rows - row),
                  out + row * hidden_);
    }
  }

 private:
  bool DividesColumns() const noexcept { return !ranks_.IsSingleRank() && !by_experts_; }

  // Divides scratch memory; returns the number of floats.
  int64_t Place(float* memory) noexcept {
    int64_t used = 0;
    const auto take = [&](int64_t floats) {
      used += floats;
      return memory == nullptr ? nullptr : memory + used - floats;
    };
    expert_rows_ = take(kMaxExpertRows * hidden_);
    gate_up_ = moe_.gated ? take(kMaxExpertRows * 2 * own_width_) : nullptr;
    own_gated_ = take(kMaxExpertRows * own_width_);
    gated_ = DividesColumns() ? take(kMaxExpertRows * width_) : own_gated_;
    if (DividesColumns()) sums_ = take(max_rows_ * own_hidden_);
    if (by_experts_) outputs_ = take(max_rows_ * moe_.num_experts_per_tok * hidden_);
    return used;
  }

  void ForwardRows(const float* x, const float* logits, int64_t rows, float* out) noexcept {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = row * moe_.num_experts_per_tok;
      router_.Route(logits + row * moe_.num_experts, row_experts_.data() + first, row_weights_.data() + first);
    }
    const std::span<const ExpertRow> entries(entries_.data(), static_cast<size_t>(GroupByExpert(rows)));
    float* sums = DividesColumns() ? sums_ : out;
    std::fill_n(sums, rows * own_hidden_, 0.0F);
    if (by_experts_) {
      const int64_t begin = FirstEntry(ranks_.Rank()), end = FirstEntry(ranks_.Rank() + 1);
      ForGroups(entries.subspan(begin, end - begin), [&](std::span<const ExpertRow> group) {
        Compute(group, x, rows, outputs_ + (group.data() - entries.data()) * hidden_);
      });
      GatherOutputs();
      Combine(entries, outputs_, sums);
    } else {
      ForGroups(entries, [&](std::span<const ExpertRow> group) {
        Compute(group, x, rows, expert_rows_);
        Combine(group, expert_rows_, sums);
      });
    }
    if (DividesColumns()) ranks_.AllGatherColumns(sums, rows, ranks_.PartitionOf(hidden_), out);
  }

  template <class Visit>
  static void ForGroups(std::span<const ExpertRow> entries, Visit visit) noexcept {
    for (size_t first = 0; first < entries.size(); first += kMaxExpertRows) {
      visit(entries.subspan(first, std::min<size_t>(kMaxExpertRows, entries.size() - first)));
    }
  }

  // First of a rank's entries, which are next to each other. After GroupByExpert.
  int64_t FirstEntry(int rank) const noexcept {
    const int64_t expert = parts_.Begin(rank);
    return expert == 0 ? 0 : first_entry_[static_cast<size_t>(expert - 1)];  // the end of the expert before
  }

  // The outputs of the other ranks' experts.
  void GatherOutputs() noexcept {
    std::array<parallel::Destination, parallel::kMaxRanks> to;
    for (int rank = 0; rank < parts_.ranks; ++rank) {
      const int64_t first = FirstEntry(rank), count = FirstEntry(rank + 1) - first;
      to[static_cast<size_t>(rank)] = {.first = reinterpret_cast<uint8_t*>(outputs_ + first * hidden_),
                                       .rows = 1,
                                       .row_bytes = count * hidden_ * static_cast<int64_t>(sizeof(float))};
    }
    ranks_.AllGather(outputs_ + FirstEntry(ranks_.Rank()) * hidden_,
                     std::span(to).first(static_cast<size_t>(parts_.ranks)));
  }

  // Fills entries_ in ascending order of experts, and of rows for each; returns their number. Experts of weight 0,
  // which add nothing, have none.
  int64_t GroupByExpert(int64_t rows) noexcept {
    const auto pairs = static_cast<size_t>(rows * moe_.num_experts_per_tok);
    std::fill(first_entry_.begin(), first_entry_.end(), 0);
    for (size_t i = 0; i < pairs; ++i) {
      if (row_weights_[i] != 0) ++first_entry_[static_cast<size_t>(row_experts_[i]) + 1];
    }
    for (size_t end = 1; end < first_entry_.size(); ++end) first_entry_[end] += first_entry_[end - 1];
    const int64_t count = first_entry_.back();
    for (size_t i = 0; i < pairs; ++i) {
      if (row_weights_[i] == 0) continue;
      const auto row = static_cast<int32_t>(i / static_cast<size_t>(moe_.num_experts_per_tok));
      const int32_t expert = row_experts_[i];
      entries_[static_cast<size_t>(first_entry_[static_cast<size_t>(expert)]++)] = {row, expert, row_weights_[i]};
    }
    return count;
  }

  // outputs: f32 [entries][own_hidden_] of the experts for the rows of `entries`, at most kMaxExpertRows. May be
  // expert_rows_.
  void Compute(std::span<const ExpertRow> entries, const float* x, int64_t rows, float* outputs) noexcept {
    const auto count = static_cast<int64_t>(entries.size());
    const bool reads_x = rows == 1 && !moe_.apply_router_weight_on_input;  // one row, the input of all its experts
    if (!reads_x) Gather(entries, x, expert_rows_);
    Multiply(entries, &ExpertWeights::gate_up, reads_x ? x : expert_rows_, reads_x ? 0 : hidden_,
             moe_.gated ? gate_up_ : own_gated_, (moe_.gated ? 2 : 1) * own_width_);
    ForParts(*context_->threads, count, own_width_, [&](int64_t first, int64_t end) {
      if (!moe_.gated)
        return ActivateRow(Pointwise::kSquaredRelu, {}, own_gated_ + first * own_width_, (end - first) * own_width_);
      for (int64_t i = first; i < end; ++i) {
        float* gate = gate_up_ + i * 2 * own_width_;
        float* gated = own_gated_ + i * own_width_;
        if (moe_.limits_gate) CutOffRowAbove(gate, own_width_, moe_.activation_limit);
        if (moe_.activation_limit != 0) {
          LimitedSiluMulRow(activate_mul_, gate, gate + own_width_, moe_.activation_limit, own_width_, gated);
        } else {
          activate_mul_(gate, gate + own_width_, own_width_, gated);
        }
      }
    });
    if (DividesColumns()) ranks_.AllGatherColumns(own_gated_, count, ranks_.PartitionOf(width_), gated_);
    Multiply(entries, &ExpertWeights::down, gated_, width_, outputs, own_hidden_);
  }

  void Gather(std::span<const ExpertRow> entries, const float* x, float* expert_rows) noexcept {
    ForParts(*context_->threads, std::ssize(entries), hidden_, [&](int64_t first, int64_t end) {
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
      const Linear& linear = *(experts_[static_cast<size_t>(entries[first].expert - first_expert_)].*layer);
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
  void Combine(std::span<const ExpertRow> entries, const float* outputs, float* sums) noexcept {
    const int64_t lines = CeilDiv(own_hidden_, kLineFloats);
    ForParts(*context_->threads, lines, kLineFloats * std::ssize(entries), [&](int64_t first_line, int64_t end_line) {
      const int64_t first = first_line * kLineFloats, end = std::min(own_hidden_, end_line * kLineFloats);
      for (size_t i = 0; i < entries.size(); ++i) {
        const float weight = moe_.apply_router_weight_on_input ? 1.0F : entries[i].weight;
        context_->isa.rows.add_scaled(sums + entries[i].row * own_hidden_ + first,
                                      outputs + static_cast<int64_t>(i) * own_hidden_ + first, weight, end - first);
      }
    });
  }

  std::shared_ptr<LinearContext> context_;
  const std::vector<ExpertWeights> experts_;  // this rank's
  const MoeConfig moe_;
  const int64_t hidden_, own_hidden_;  // channels of rows, and of these the ones that this rank computes
  const int64_t width_, own_width_;    // the same of an expert
  parallel::Communicator alone_;
  parallel::Communicator& ranks_;
  const bool by_experts_;
  const parallel::Partition parts_;  // partition of the experts, with by_experts_
  const int64_t first_expert_;       // first expert of this rank
  const int64_t max_rows_;           // rows that are routed together
  const ActivateMulKernel activate_mul_;
  ExpertRouter router_;
  // Experts of a group of rows: [rows][num_experts_per_tok], then ordered by expert.
  std::vector<int32_t> row_experts_;
  std::vector<float> row_weights_;
  std::vector<ExpertRow> entries_;
  std::vector<int64_t> first_entry_;  // [experts + 1]; after GroupByExpert, the end of each expert's
  // Scratch in context_->expert_rows, f32 [kMaxExpertRows][...] but for the last two:
  float* expert_rows_ = nullptr;  // hidden_: inputs, later outputs
  float* gate_up_ = nullptr;      // 2 own_width_; none without gates
  float* own_gated_ = nullptr;    // own_width_
  float* gated_ = nullptr;        // width_
  float* sums_ = nullptr;         // [max_rows_][own_hidden_], where ranks divide columns
  float* outputs_ = nullptr;      // [entries][hidden_], where ranks divide experts
  std::vector<LinearProduct> products_;
};

}  // namespace

std::unique_ptr<ExpertLayer> MakeCpuExperts(std::shared_ptr<LinearContext> context, std::vector<ExpertWeights> experts,
                                            const MoeConfig& moe, const RouterVectors& router,
                                            const ExpertDivision& division) {
  return std::make_unique<CpuExperts>(std::move(context), std::move(experts), moe, router, division);
}

}  // namespace kvanta::kernels
