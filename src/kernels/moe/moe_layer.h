// Layers of experts behind one small interface, for devices whose memory is not the host's: which experts a row has is
// known there alone (kernels/ops.h, models/experts.cc).
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/linear/linear.h"

namespace kvanta::kernels {

// How a row's experts follow from its router's logits, as in models/config.h.
struct ExpertRule {
  int32_t count = 0;
  int32_t chosen = 0;
  int32_t groups = 1;
  int32_t topk_group = 1;
  bool sigmoid = false;
  bool normalized = false;
  float scale = 1;
};

// One expert: down(silu(gate(x)) * up(x)).
struct ExpertWeights {
  std::unique_ptr<Linear> gate_up;  // hidden -> gate | up
  std::unique_ptr<Linear> down;     // -> hidden
};

class ExpertLayer {
 public:
  virtual ~ExpertLayer() = default;
  // out[r] = the sum over the experts that logits[r] choose, in ascending order, of what they make of x[r] times their
  // weights. x, out: f32 [rows][hidden]; logits: f32 [rows][count].
  virtual void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept = 0;
};

}  // namespace kvanta::kernels
