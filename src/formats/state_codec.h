// Codecs of recurrent states. Between positions of a grid a state is f32. At a grid position every run, after a prefix
// hit or not, rounds it through its code, so that a snapshot there holds what any run continues with (docs/formats.md).
//
// Layout of a layer's coded state, for each matrix [rows][columns]:
//   bf16:       values bf16 [rows][columns]
//   int8, int4: scales bf16 [columns], then codes [rows][columns]: int8, or 4 bits, an even column in the lower half
// and then the other floats: as bf16; with integers, in blocks of 32 (the last one may be shorter), each a scale in
// bf16 and int8 codes. Integers of a matrix are those of the Hadamard transform of each column, in blocks of the
// largest power of two that divides the rows.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvanta::formats {

enum class StateCode : uint8_t { kFloat32, kBf16, kInt8, kInt4 };
inline constexpr std::string_view kStateCodeNames[] = {"float32", "bfloat16", "int8", "int4"};

constexpr std::string_view Name(StateCode code) noexcept {
  return kStateCodeNames[static_cast<int>(code)];
}
// Throws InputError that lists the names.
StateCode ParseStateCode(std::string_view name);

// A layer's state, f32: matrices [matrices][rows][columns], then `others` floats (the inputs of a convolution). columns
// is even.
struct StateShape {
  int64_t matrices = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t others = 0;

  bool operator==(const StateShape&) const = default;
  int64_t MatrixFloats() const noexcept { return rows * columns; }
  int64_t Floats() const noexcept { return matrices * MatrixFloats() + others; }
  int64_t Bytes() const noexcept { return Floats() * static_cast<int64_t>(sizeof(float)); }
};

// Bytes of a coded state; of kFloat32: those of the state.
int64_t CodedStateBytes(StateCode code, const StateShape& shape) noexcept;

// Parts of a state that are coded independently of one another: the matrices, and the other floats.
inline int64_t StateParts(const StateShape& shape) noexcept {
  return shape.matrices + 1;
}
// Rounds a part of `state` (f32, the whole state) in place and, unless `coded` (the whole coded state) is null, stores
// its code there. Not for kFloat32.
void RoundStatePart(StateCode code, const StateShape& shape, int64_t part, float* state, uint8_t* coded) noexcept;
// The values of a coded part: what RoundStatePart leaves in the state.
void DecodeStatePart(StateCode code, const StateShape& shape, int64_t part, const uint8_t* coded,
                     float* state) noexcept;

}  // namespace kvanta::formats
