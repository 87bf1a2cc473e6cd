// Roofline of this machine, measured: memory bandwidth and peak arithmetic throughput, the denominators of every
// benchmark. Measure it in the same run as the figure that is compared with it.
#pragma once

#include <memory>

#include "formats/element_type.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

// The multiply-adds that bound attention over an element type.
//
//   dot        codes                            amx                     avx512, dotprod, i8mm     avx2, neon, portable
//   kF32       fp32, fp16                       f32 multiply-add        the same                  the same
//   kExact     bf16 next to quantized cells     bf16, two per product   f32 multiply-add          the same
//   kBf16      bf16                             as kExact               as kExact (zen4: bf16)    the same
//   kFp8       fp8, e3m2                        as kExact               as kBf16 (avx512fp16:     the same
//                                                                       fp16)
//   kWide      8 bits, Lloyd-Max                int8, two per product   bytes, two per product    int16
//   kSubbyte   integers up to 6 bits, e2m1      int8                    bytes                     bytes (not portable)
//   kSubbyte   trellis                          bytes                   bytes (Arm: two)          int16 takes longer
enum class Dot : uint8_t { kF32, kExact, kBf16, kFp8, kWide, kSubbyte };
inline constexpr int kDots = static_cast<int>(Dot::kSubbyte) + 1;

constexpr Dot DotOf(formats::ElementType code) noexcept {
  if (IsFp8(code)) return Dot::kFp8;
  if (!formats::IsInteger(code)) return code == formats::ElementType::kBf16 ? Dot::kBf16 : Dot::kF32;
  return HasByteOperands(code) ? Dot::kSubbyte : Dot::kWide;
}

// Memory read bandwidth of `threads` threads in bytes per second, from a buffer far larger than the caches, in huge
// pages where the system grants them. On a shared machine it varies: interleave Now() with what is compared with it.
class ReadLimit {
 public:
  // Searches for the fastest access pattern. Throws ResourceError.
  ReadLimit(int threads, const IsaTable& isa);
  ~ReadLimit();

  double Best() const noexcept;  // over all passes of the search
  double Now();                  // rate of one more pass of the fastest pattern, a few milliseconds

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Peak rate of attention's dots with `threads` threads, in products per second, all operands in registers.
class DotLimit {
 public:
  DotLimit(int threads, const IsaTable& isa);
  ~DotLimit();

  double Now(Dot dot);  // the best of a few passes, about a millisecond

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ReadLimit's Best().
double MeasureReadBandwidth(int threads, const IsaTable& isa);

// Bandwidth of a buffer far larger than the caches that is updated in place, in bytes per second: each byte counts when
// it is read and when it is written.
double MeasureUpdateBandwidth(int threads, const IsaTable& isa);

// Peak operations per second (two per multiply-add) of the unit's bf16 dot and f32 multiply-add, operands in registers,
// and of its exact integer dots of blocks of 8-bit and 4-bit codes, operands in L1. On units without a bf16 instruction
// the bf16 dot is an f32 multiply-add.
double MeasureBf16DotPeak(int threads, const IsaTable& isa);
double MeasureF32FmaPeak(int threads, const IsaTable& isa);
double MeasureInt8DotPeak(int threads, const IsaTable& isa);
double MeasureInt4DotPeak(int threads, const IsaTable& isa);

}  // namespace kvanta::kernels
