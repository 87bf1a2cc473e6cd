// Compressor of tokens (DeepSeek V4): an entry is, channel by channel, the mean of the values of its tokens, weighted
// by the softmax of their gates. With overlaps, it also has values and gates of the tokens of the entry before, of a
// series of their own. transformers: models/deepseek_v4/modeling_deepseek_v4.py.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "cache/recurrent_state.h"
#include "formats/state_codec.h"

namespace kvanta::kernels {

struct CompressorShape {
  int row_tokens = 1;     // tokens of an entry
  bool overlaps = false;  // an entry has two series: of its own tokens the second one, of those before the first one
  int entry_dim = 0;      // channels of an entry
  int key_dim = 0;        // channels of the indexer's key of an entry, which is made likewise; 0: none

  bool operator==(const CompressorShape&) const = default;
  KVANTA_HD constexpr int64_t Series() const noexcept { return overlaps ? 2 : 1; }
  // A token's inputs, f32: values of entries [series][entry_dim] and their gates, then the same of keys.
  KVANTA_HD constexpr int64_t InputWidth() const noexcept { return 2 * Series() * (int64_t{entry_dim} + key_dim); }
  // Tokens whose inputs are kept: those that the next entry may need.
  KVANTA_HD constexpr int64_t KeptTokens() const noexcept { return Series() * row_tokens; }
  // A sequence's state, f32: the inputs of the last tokens, that of position p in row p % KeptTokens().
  formats::StateShape State() const noexcept { return {.others = KeptTokens() * InputWidth()}; }
};

// The entries of one layer that end in a step's rows, drafted ones included, each in the row of its last token; or its
// states alone over rows whose entries were made before.
struct CompressorOp {
  CompressorShape shape;
  const float* inputs = nullptr;       // [rows][InputWidth()]
  const int64_t* positions = nullptr;  // [rows]
  int64_t rows = 0;
  // Added to the gates, by the token's place in its entry: [row_tokens][series][entry_dim or key_dim].
  const float *entry_bias = nullptr, *key_bias = nullptr;
  cache::StateStep states;
  float* entries = nullptr;  // [rows][entry_dim], other rows are not written; null: states alone
  float* keys = nullptr;     // [rows][key_dim]
};

}  // namespace kvanta::kernels
