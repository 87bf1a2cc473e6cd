// Device primitives (src/kernels/cuda/primitives_nvcc.h) for kernels on the emulated grid (cuda_grid.h); instructions
// are computed lane by lane by PTX's specification.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/dtype.h"
#include "emulated/cuda_grid.h"
#include "formats/minifloat.h"
#include "kernels/cuda/types.h"

#define KVANTA_DEVICE inline
#define KVANTA_DEVICE_CALL inline
#define KVANTA_UNROLL
#define KVANTA_UNROLL_BY(count)

namespace kvanta::emulated {

using kernels::cuda::Vec2;
using kernels::cuda::Vec4;

template <class T>
T ShuffleXor(T value, int mask) {
  struct Operand {
    T value, result;
    int mask;
  } operand{value, value, mask};
  WarpOperation("ShuffleXor", &operand, [](void* const* lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      auto* own = static_cast<Operand*>(lanes[lane]);
      own->result = static_cast<Operand*>(lanes[lane ^ own->mask])->value;
    }
  });
  return operand.result;
}

inline bool AnyLane(bool value) {
  int any = value ? 1 : 0;
  for (int mask = 1; mask < kWarp; mask *= 2) any |= ShuffleXor(any, mask);
  return any != 0;
}

inline bool IsLastToArrive(uint32_t* counter, int count) {
  SyncBlock();
  bool is_last = false;
  if (ThreadIndex() == 0) {
    if (*counter >= static_cast<uint32_t>(count)) Stop("{} blocks before this one of {}", *counter, count);
    is_last = ++*counter == static_cast<uint32_t>(count);
    if (is_last) *counter = 0;
  }
  return AnyThread(is_last);
}

inline void AtomicAdd(int64_t* sum, int64_t value) {
  CheckAlignment(sum, alignof(int64_t));
  *sum += value;
}

template <class T>
T LoadAligned(const uint8_t* from) {
  CheckAlignment(from, alignof(T));
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
inline Vec4 LoadVec4(const uint8_t* from) {
  return LoadAligned<Vec4>(from);
}
inline Vec2 LoadVec2(const uint8_t* from) {
  return LoadAligned<Vec2>(from);
}
inline uint32_t LoadWord(const uint8_t* from) {
  return LoadAligned<uint32_t>(from);
}

inline Vec4 LoadFresh4(const float* from) {
  return LoadAligned<Vec4>(reinterpret_cast<const uint8_t*>(from));
}
inline float LoadFresh(const float* from) {
  return *from;
}

inline Vec4 LoadStreamed4(const uint8_t* from) {
  return LoadAligned<Vec4>(from);
}
inline Vec2 LoadStreamed2(const uint8_t* from) {
  return LoadAligned<Vec2>(from);
}

template <class T>
T LoadShared(int64_t offset) {
  T value;
  std::memcpy(&value, Shared(offset, sizeof(T), alignof(T), Access::kRead), sizeof(T));
  return value;
}
template <class T>
void StoreShared(int64_t offset, T value) {
  std::memcpy(Shared(offset, sizeof(T), alignof(T), Access::kWrite), &value, sizeof(T));
}

inline void CopyToShared16(int offset, const uint8_t* from) {
  BeginCopy(offset, from, 16);
}
template <int kGroups>
void WaitForCopies() {
  WaitForCopies(kGroups);
}

// Sums of 16 exact products and c, rounded once. A GPU's rounding differs by at most a few units in the last place of
// the largest term.
struct MmaOperand {
  float* c;
  const Vec4* a;
  uint32_t b[2];
};
template <float (*Value)(uint16_t)>
void MmaLanes(void* const* lanes) {
  const auto operand = [&](int lane) -> const MmaOperand& { return *static_cast<const MmaOperand*>(lanes[lane]); };
  const auto half = [](uint32_t word, int which) {
    return double{Value(static_cast<uint16_t>(word >> static_cast<unsigned>(16 * which)))};
  };
  double a[16][16];  // [row][k]
  double b[16][8];   // [k][column]
  double sums[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 8; ++i)
      a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = half(operand(lane).a->word[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = half(operand(lane).b[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = double{operand(lane).c[i]};
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 4; ++i) {
      operand(lane).c[i] = static_cast<float>(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
  }
}
inline float F16Value(uint16_t bits) {
  return Fp16ToFloat(bits);
}
inline float Bf16Value(uint16_t bits) {
  return Bf16ToFloat(bits);
}

inline void MmaF16(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
  MmaOperand operand{.c = c, .a = &a, .b = {b0, b1}};
  WarpOperation("MmaF16", &operand, &MmaLanes<F16Value>);
}
inline void MmaBf16(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
  MmaOperand operand{.c = c, .a = &a, .b = {b0, b1}};
  WarpOperation("MmaBf16", &operand, &MmaLanes<Bf16Value>);
}

inline uint32_t Pair(uint16_t first, uint16_t second) {
  return first | (uint32_t{second} << 16U);
}
inline uint32_t Transpose8x8(uint32_t pair) {
  struct Operand {
    uint32_t pair, transposed;
  } operand{pair, pair};
  WarpOperation("Transpose8x8", &operand, [](void* const* lanes) {
    const auto at = [lanes](int row, int column) {
      const uint32_t word = static_cast<Operand*>(lanes[4 * row + column / 2])->pair;
      return static_cast<uint16_t>(word >> (column % 2 == 0 ? 0U : 16U));
    };
    for (int lane = 0; lane < kWarp; ++lane) {
      const int row = lane / 4;
      const int column = lane % 4 * 2;
      static_cast<Operand*>(lanes[lane])->transposed = Pair(at(column, row), at(column + 1, row));
    }
  });
  return operand.transposed;
}
inline uint16_t First(uint32_t pair) {
  return static_cast<uint16_t>(pair);
}
inline uint16_t Second(uint32_t pair) {
  return static_cast<uint16_t>(pair >> 16U);
}

inline uint32_t AndXor(uint32_t word, uint32_t mask, uint32_t flip) {
  return (word & mask) ^ flip;
}
inline uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = low | (uint64_t{high} << 32U);
  uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned which = (selector >> (4 * i)) & 7U;
    result |= static_cast<uint32_t>((bytes >> (8 * which)) & 0xffU) << (8 * i);
  }
  return result;
}
inline uint32_t PackF16(float first, float second) {
  return Pair(FloatToFp16(first), FloatToFp16(second));
}
inline uint32_t PackBf16(float first, float second) {
  return Pair(FloatToBf16(first), FloatToBf16(second));
}
inline float F16ToFloat(uint16_t bits) {
  return Fp16ToFloat(bits);
}
// Rounds a double to f16 through float: round to odd first, so that the second rounding does not see a false tie.
inline uint16_t RoundToF16(double x) {
  const auto rounded = static_cast<float>(x);
  const double lost = x - double{rounded};
  auto bits = std::bit_cast<uint32_t>(rounded);
  if (lost != 0 && (bits & 1U) == 0) bits += (lost > 0) == (rounded > 0 || (rounded == 0 && x > 0)) ? 1U : ~0U;
  return FloatToFp16(std::bit_cast<float>(bits));
}
inline uint32_t MultiplyF16(uint32_t x, uint32_t y) {
  return Pair(FloatToFp16(F16Value(First(x)) * F16Value(First(y))),
              FloatToFp16(F16Value(Second(x)) * F16Value(Second(y))));
}
inline uint32_t MultiplyAddF16(uint32_t x, uint32_t y, uint32_t z) {
  const auto fma = [](uint16_t a, uint16_t b, uint16_t c) {
    return RoundToF16(double{F16Value(a)} * double{F16Value(b)} + double{F16Value(c)});
  };
  return Pair(fma(First(x), First(y), First(z)), fma(Second(x), Second(y), Second(z)));
}
inline constexpr bool kConvertsE4m3 = true;
inline uint32_t E4m3ToF16(uint32_t bytes) {
  const auto convert = [](uint32_t byte) { return FloatToFp16(formats::E4m3::Decode(static_cast<uint8_t>(byte))); };
  return Pair(convert(bytes & 0xffU), convert((bytes >> 8U) & 0xffU));
}

inline float Exp2(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0F : y;
}
inline float Tanh(float x) {
  return std::tanh(x);
}
inline float SquareRoot(float x) {
  return std::sqrt(x);
}
inline double SquareRoot(double x) {
  return std::sqrt(x);
}
inline float MultiplyAdd(float x, float y, float z) {
  return std::fma(x, y, z);
}

}  // namespace kvanta::emulated

namespace kvanta::kernels::cuda {
using namespace emulated;  // NOLINT(google-build-using-namespace): the kernels call them unqualified
}  // namespace kvanta::kernels::cuda
