// The weights of a layer's routed experts, in every layout of published checkpoints.
#pragma once

#include <string>
#include <vector>

#include "models/layer_blocks.h"

namespace kvanta::models {

// `module`: "model.layers.0.mlp.experts.". The first of these layouts that the checkpoint has:
//   gate_up_proj, down_proj                 [experts][in][out] of all experts; interleaved gate and up
//                                           columns (GPT-OSS), or one after the other (Llama 4);
//                                           or [experts][out][in] (Qwen3.5)
//   gate_up_proj_blocks, ..._scales, ...    the same transposed, [experts][out][in], in MXFP4
//   N.w1, N.w3, N.w2                        gate, up and down of expert N (Mixtral)
//   N.gate_proj, N.up_proj, N.down_proj
std::vector<kernels::ExpertWeights> ReadExperts(const BlockSource& source, const std::string& module);

}  // namespace kvanta::models
