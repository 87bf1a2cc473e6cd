// Tables of the layers' rotary position embeddings on a device, one for each rope that differs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "models/blocks/layer_blocks.h"
#include "models/config/config.h"

namespace kvanta::models {

class RopeTables {
 public:
  // exponents: the frequencies are multiplied by their exponentials, [rotary_dim / 2]; empty: they are not. Throws
  // InputError where `positions` are none, or more than the model takes.
  RopeTables(kernels::Ops& ops, const ModelConfig& config, int64_t positions, std::span<const float> exponents = {});

  // Sets the step's rope, for its layer.
  void Set(const ModelConfig& config, AttentionStep& step) const noexcept;

 private:
  // f32 [positions][rotary_dim], cos | sin; empty without rope.
  struct Tables {
    Buffer keys, queries;
  };

  std::vector<Tables> tables_;
  std::vector<int> of_layer_;  // index into tables_
  Buffer query_scales_;        // f32 [positions], QueryScales(); empty: none
};

}  // namespace kvanta::models
