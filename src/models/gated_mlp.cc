// Gated MLP of one layer, or of one expert.
#include "models/layer_blocks.h"

namespace kvanta::models {
namespace {

class GatedMlp final : public MlpBlock {
 public:
  GatedMlp(const BlockSource& source, const std::string& module, int64_t intermediate_size, bool bias)
      : ops_(source.ops), activation_(source.config.mlp.activation), intermediate_size_(intermediate_size) {
    const int64_t hidden = source.config.hidden;
    const auto read_gate_up = [&](std::initializer_list<StackedWeight> stack) {
      return source.reader.Linear(stack, hidden, bias, source.store);
    };
    if (source.config.mlp.fused) {
      gate_up_ = read_gate_up({{module + "gate_up_proj", 2 * intermediate_size}});
    } else {
      gate_up_ = read_gate_up({{module + "gate_proj", intermediate_size}, {module + "up_proj", intermediate_size}});
    }
    const std::string down = module + "down_proj";
    down_ = source.reader.Linear({{down, hidden}}, intermediate_size, bias,
                                 {source.store, source.reader.AmplifiesRounding(down)});
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    both_ = scratch.Take(rows * 2 * intermediate_size_);
    gated_ = scratch.Take(rows * intermediate_size_);
  }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    gate_up_->Forward(x, rows, both_, 2 * intermediate_size_);
    ops_.ActivateMul(activation_, both_, rows, intermediate_size_, gated_);
    down_->Forward(gated_, rows, out, down_->Out());
  }

 private:
  kernels::Ops& ops_;
  kernels::Activation activation_;
  int64_t intermediate_size_;
  std::unique_ptr<kernels::Linear> gate_up_;  // hidden -> 2 intermediate_size: gate | up
  std::unique_ptr<kernels::Linear> down_;     // intermediate_size -> hidden
  float* both_ = nullptr;                     // [rows][2 intermediate_size]
  float* gated_ = nullptr;                    // [rows][intermediate_size]
};

}  // namespace

std::unique_ptr<MlpBlock> ReadGatedMlp(const BlockSource& source, const std::string& module, int64_t intermediate_size,
                                       bool bias) {
  return std::make_unique<GatedMlp>(source, module, intermediate_size, bias);
}

}  // namespace kvanta::models
