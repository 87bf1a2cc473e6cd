// Transforms applied to a row before encoding (and to q, and inversely to the attention output).
#pragma once

namespace kvanta::formats {

// Largest power of two that divides head_dim: the block of the (block-diagonal) Hadamard transform; 80 -> 16.
int HadamardBlock(int head_dim) noexcept;

// In place, f32, stages of stride 1, 2, 4, ..., one final multiply by 1/sqrt(block). Its own inverse up to rounding.
// Bit-exact everywhere: no FMA contraction. x: [head_dim].
void Hadamard(float* x, int head_dim) noexcept;

}  // namespace kvanta::formats
