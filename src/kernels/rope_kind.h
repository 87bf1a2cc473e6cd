// Pairs of channels that Ops::Rope rotates, and by which position of its table.
#pragma once

namespace kvanta::kernels {

struct RopeKind {
  bool interleaved = false;  // channel 2 i with 2 i + 1; else i with i + rotary_dim / 2 (Hugging Face's "half" order)
  bool inverse = false;      // rotates back; only interleaved
  int row_tokens = 1;        // rows of several tokens, whose positions are those of the last: by that of the first
};

}  // namespace kvanta::kernels
