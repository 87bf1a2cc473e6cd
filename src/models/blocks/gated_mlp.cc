// Gated MLP of one layer, or of one expert.
#include <algorithm>
#include <optional>

#include "base/math.h"
#include "models/blocks/layer_blocks.h"

namespace kvanta::models {
namespace {

class GatedMlp final : public MlpBlock {
 public:
  GatedMlp(const BlockSource& source, const std::string& module, const GatedMlpShape& shape)
      : ops_(source.ops),
        activation_(source.config.mlp.activation),
        limit_(shape.limit),
        limits_gate_(shape.limits_gate),
        gate_scale_(source.config.mlp.gate_scale),
        width_(source.ranks.PartitionOf(shape.intermediate_size).Size(source.ranks.Rank())),
        gathered_(source.ranks, shape.intermediate_size) {
    const int64_t hidden = source.config.hidden, intermediate_size = shape.intermediate_size;
    const bool bias = source.config.mlp.bias;
    const auto read_gate_up = [&](std::initializer_list<StackedWeight> stack) {
      return source.reader.Linear(stack, hidden, bias, source.store);
    };
    const TensorNames& names = source.config.names;
    // A GGUF file may have the parts of what Hugging Face fuses.
    if (source.config.mlp.kind == MlpKind::kFusedGate && !source.reader.HasPrefix(module + "gate_proj.")) {
      const std::string fused = module + std::string(names.gate_up);
      const int64_t both = 2 * intermediate_size;
      gate_up_ = source.ranks.IsSingleRank()
                     ? read_gate_up({{fused, both}})
                     : read_gate_up({{.module = fused, .out = intermediate_size, .tensor_out = both},
                                     {.module = fused,
                                      .out = intermediate_size,
                                      .tensor_out = both,
                                      .tensor_first = intermediate_size}});
    } else {
      gate_up_ = read_gate_up(
          {{module + std::string(names.gate), intermediate_size}, {module + std::string(names.up), intermediate_size}});
    }
    const std::string down = module + std::string(names.down);
    down_.emplace(source.ranks,
                  source.reader.Linear({{down, hidden}}, intermediate_size, bias,
                                       {source.store, source.reader.AmplifiesRounding(down)}),
                  hidden);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    rows = std::min(rows, gate_up_->BlockRows());
    both_ = scratch.Take(rows * 2 * width_);
    gated_ = scratch.Take(rows * width_);
    gathered_.Place(scratch, rows);
    down_->Place(scratch, rows);
  }

  const kernels::Linear* Reader() const noexcept override { return gate_up_.get(); }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    const int64_t hidden = gate_up_->In();
    const int64_t blocks = CeilDiv(rows, gate_up_->BlockRows());
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * rows / blocks, end = (block + 1) * rows / blocks;
      ForwardBlock(x + first * hidden, end - first, out + first * hidden);
    }
  }

 private:
  // As Forward, for rows whose activations fit in the scratch memory.
  void ForwardBlock(const float* x, int64_t rows, float* out) noexcept {
    const bool is_whole = width_ == gathered_.Columns();  // else other ranks' columns come between
    const kernels::Linear* const reader = is_whole ? down_->Reader() : nullptr;
    if (gate_scale_ == 1 && !limits_gate_) {
      ops_.ForwardGated(*gate_up_, x, rows, activation_, limit_, both_, gated_, reader);
    } else {
      gate_up_->Forward(x, rows, both_, 2 * width_);
      if (gate_scale_ != 1) ops_.ScaleColumns(both_, 2 * width_, rows, width_, gate_scale_);
      if (limits_gate_) ops_.CutOffAbove(both_, 2 * width_, rows, width_, limit_);
      ops_.ActivateMul(activation_, limit_, both_, rows, width_, gated_, reader);
    }
    down_->Forward(gathered_.Gather(gated_, rows), rows, out);
  }

  kernels::Ops& ops_;
  kernels::Activation activation_;
  float limit_;  // of activation_
  bool limits_gate_;
  float gate_scale_;
  int64_t width_;                             // this rank's part of intermediate_size
  std::unique_ptr<kernels::Linear> gate_up_;  // hidden -> 2 width: gate | up
  GatheredColumns gathered_;                  // intermediate_size columns
  std::optional<ColumnParallelLinear> down_;  // intermediate_size -> hidden
  float* both_ = nullptr;                     // [rows of a block][2 width]
  float* gated_ = nullptr;                    // [rows of a block][width]
};

}  // namespace

std::unique_ptr<MlpBlock> ReadGatedMlp(const BlockSource& source, const std::string& module,
                                       const GatedMlpShape& shape) {
  return std::make_unique<GatedMlp>(source, module, shape);
}

}  // namespace kvanta::models
