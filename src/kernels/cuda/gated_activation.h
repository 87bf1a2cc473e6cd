// Activations of gated MLPs. Include the primitives first.
#pragma once

#include "kernels/activation.h"

namespace kvanta::kernels::cuda {

KVANTA_DEVICE float SwigluOai(float gate, float up) {
  const float x = gate > kSwigluOaiLimit ? kSwigluOaiLimit : gate;  // NaN stays NaN
  float y = up > kSwigluOaiLimit ? kSwigluOaiLimit : up;
  y = y < -kSwigluOaiLimit ? -kSwigluOaiLimit : y;
  return x / (1.0F + Exp2(-kSwigluOaiAlpha * kLog2E * x)) * (y + 1.0F);
}

// activation(gate) * up, with the limit of Ops::ActivateMul().
KVANTA_DEVICE float GatedValue(Activation activation, float limit, float gate, float up) {
  if (activation == Activation::kSwigluOai) return SwigluOai(gate, up);
  const float exponent = activation == Activation::kSilu ? -gate : gate * (gate * gate * kGeluCubic + kGeluLinear);
  float y = gate / (1.0F + Exp2(exponent * kLog2E));
  if (limit != 0) {  // NaN stays NaN
    y = y > limit ? limit : y;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return y * up;
}

}  // namespace kvanta::kernels::cuda
