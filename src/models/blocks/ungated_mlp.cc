// MLP without a gate.
#include <algorithm>
#include <cmath>
#include <optional>

#include "base/math.h"
#include "models/blocks/layer_blocks.h"

namespace kvanta::models {
namespace {

class UngatedMlp final : public MlpBlock {
 public:
  UngatedMlp(const BlockSource& source, const std::string& module, int64_t intermediate_size)
      : ops_(source.ops),
        activation_(source.config.mlp.pointwise),
        width_(source.ranks.PartitionOf(intermediate_size).Size(source.ranks.Rank())),
        gathered_(source.ranks, intermediate_size) {
    const int64_t hidden = source.config.hidden;
    const bool bias = source.config.mlp.bias;
    const TensorNames& names = source.config.names;
    if (activation_ == kernels::Pointwise::kXielu) xielu_ = ReadXielu(source.reader, module + "act_fn.");
    up_ = source.reader.Linear({{module + std::string(names.up), intermediate_size}}, hidden, bias, source.store);
    const std::string down = module + std::string(names.down);
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

  const kernels::Linear* Reader() const noexcept override { return up_.get(); }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    const int64_t hidden = up_->In();
    const int64_t blocks = CeilDiv(rows, up_->BlockRows());
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * rows / blocks, count = (block + 1) * rows / blocks - first;
      up_->Forward(x + first * hidden, count, activated_, width_);
      ops_.Activate(activation_, xielu_, activated_, count * width_);
      down_->Forward(gathered_.Gather(activated_, count), count, out + first * hidden);
    }
  }

 private:
  // transformers: XIELUActivation in activations.py. alpha_p and alpha_n are stored before their softplus.
  static kernels::Xielu ReadXielu(WeightReader& reader, const std::string& module) {
    const auto read = [&](const char* name, double missing) {
      return reader.Has(module + name) ? double{reader.Scalar(module + name)} : missing;
    };
    const auto softplus = [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); };
    const double beta = read("beta", 0.5);
    read("eps", 0);
    reader.AddBytes(2 * sizeof(float));
    return {.alpha_p = static_cast<float>(softplus(reader.Scalar(module + "alpha_p"))),
            .alpha_n = static_cast<float>(beta + softplus(reader.Scalar(module + "alpha_n"))),
            .beta = static_cast<float>(beta)};
  }

  kernels::Ops& ops_;
  kernels::Pointwise activation_;
  kernels::Xielu xielu_;
  int64_t width_;                             // this rank's part of intermediate_size
  std::unique_ptr<kernels::Linear> up_;       // hidden -> width
  GatheredColumns gathered_;                  // intermediate_size columns
  std::optional<ColumnParallelLinear> down_;  // intermediate_size -> hidden
  float* activated_ = nullptr;                // [rows of a block][width]
};

}  // namespace

std::unique_ptr<MlpBlock> ReadUngatedMlp(const BlockSource& source, const std::string& module,
                                         int64_t intermediate_size) {
  return std::make_unique<UngatedMlp>(source, module, intermediate_size);
}

}  // namespace kvanta::models
