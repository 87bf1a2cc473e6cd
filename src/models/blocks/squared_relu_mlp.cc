// MLP without a gate, of squared ReLU.
#include <algorithm>
#include <optional>

#include "base/math.h"
#include "models/blocks/layer_blocks.h"

namespace kvanta::models {
namespace {

class SquaredReluMlp final : public MlpBlock {
 public:
  SquaredReluMlp(const BlockSource& source, const std::string& module, int64_t intermediate_size)
      : ops_(source.ops),
        width_(source.ranks.PartitionOf(intermediate_size).Size(source.ranks.Rank())),
        gathered_(source.ranks, intermediate_size) {
    const int64_t hidden = source.config.hidden;
    const bool bias = source.config.mlp.bias;
    up_ = source.reader.Linear({{module + "up_proj", intermediate_size}}, hidden, bias, source.store);
    const std::string down = module + "down_proj";
    down_.emplace(source.ranks,
                  source.reader.Linear({{down, hidden}}, intermediate_size, bias,
                                       {source.store, source.reader.AmplifiesRounding(down)}),
                  hidden);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    rows = std::min(rows, up_->BlockRows());
    activated_ = scratch.Take(rows * width_);
    gathered_.Place(scratch, rows);
    down_->Place(scratch, rows);
  }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    const int64_t hidden = up_->In();
    const int64_t blocks = CeilDiv(rows, up_->BlockRows());
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * rows / blocks, count = (block + 1) * rows / blocks - first;
      up_->Forward(x + first * hidden, count, activated_, width_);
      ops_.SquaredRelu(activated_, count * width_);
      down_->Forward(gathered_.Gather(activated_, count), count, out + first * hidden);
    }
  }

 private:
  kernels::Ops& ops_;
  int64_t width_;                             // this rank's part of intermediate_size
  std::unique_ptr<kernels::Linear> up_;       // hidden -> width
  GatheredColumns gathered_;                  // intermediate_size columns
  std::optional<ColumnParallelLinear> down_;  // intermediate_size -> hidden
  float* activated_ = nullptr;                // [rows of a block][width]
};

}  // namespace

std::unique_ptr<MlpBlock> ReadSquaredReluMlp(const BlockSource& source, const std::string& module,
                                             int64_t intermediate_size) {
  return std::make_unique<SquaredReluMlp>(source, module, intermediate_size);
}

}  // namespace kvanta::models
