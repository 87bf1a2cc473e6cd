// The weights of a layer's routed experts, in every layout of published checkpoints.
#pragma once

#include <string>
#include <vector>

#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

// `module`: "model.layers.0.mlp.". The first of these layouts that the checkpoint has:
//   fused_gate_up, fused_down               of TensorNames: [experts][in][out] of all experts; interleaved gate and up
//                                           columns (GPT-OSS), or one after the other (Llama 4);
//                                           or [experts][out][in] (Qwen3.5, Granite); either (Qwen3-VL)
//   fused_gate_up_blocks, ..._scales, ...   the same transposed, [experts][out][in], in MXFP4
//   experts.N.w1, .w3, .w2                  gate, up and down of expert N (Mixtral)
//   experts.N.gate_proj, .up_proj, .down_proj
std::vector<kernels::ExpertWeights> ReadExperts(const BlockSource& source, const std::string& module);

}  // namespace kvanta::models
