// Integers of 2 to 8 bits packed in 32-bit words: w = (code - zero point) * scale of its group.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weights/quantized/quantized_weights.h"

namespace kvanta::weights {

// Places of the codes in the words.
enum class Packing : uint8_t {
  kRows,     // [out][words of a row]: consecutive k of a row, lowest bits first (compressed-tensors)
  kColumns,  // [words of a row][out]: likewise, transposed (GPTQ)
  kAwq,      // [in][out / 8]: 8 rows of one k, in AWQ's order (4 bits)
};

// Word of 32 bits at index `i` of unaligned data.
uint32_t WordAt(const uint8_t* data, int64_t i) noexcept;

// Position in a word of AWQ's of the code of row r, r % 8.
inline constexpr int kAwqPosition[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// 32-bit words of `count` codes of `bits` bits, packed without gaps.
constexpr int64_t WordsOf(int64_t count, int bits) noexcept {
  return (count * bits + 31) / 32;
}

// Code `i` of a dense stream whose word w is word(w).
template <class Word>
uint32_t CodeOf(Word word, int64_t i, int bits) noexcept {
  const int64_t bit = i * bits;
  const auto shift = static_cast<int>(bit % 32);
  uint64_t pair = word(bit / 32);
  if (shift + bits > 32) pair |= uint64_t{word(bit / 32 + 1)} << 32;
  return static_cast<uint32_t>(pair >> shift) & ((1U << bits) - 1);
}

struct IntegerParts {
  const uint8_t* words = nullptr;
  Packing packing = Packing::kRows;
  int bits = 0;
  int64_t group = 0;                      // consecutive weights that share a scale
  std::vector<float> scales = {};         // [out][groups]
  std::vector<uint16_t> zeros = {};       // [out][groups]
  std::vector<int32_t> group_index = {};  // [in]: group of a column; empty: k / group
};

// Kept as INT4 with zero points, or with fewer or more bits as INT8 less the zero points if these fit. A group index
// whose groups have `group` columns each becomes an order of columns; another one leaves rows only. Throws InputError
// for an index out of range, which is that of the tensor `index_part`.
std::unique_ptr<QuantizedWeight> MakeIntegerWeight(const ModuleTensors& tensors, std::string_view index_part,
                                                   const WeightSource& source, IntegerParts parts);

}  // namespace kvanta::weights
