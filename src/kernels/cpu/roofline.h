// What this machine can do at most, measured: the denominators of every benchmark. Each call takes some tenths of a
// second and must run beside the measurement that is compared with it.
#pragma once

#include <memory>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

// Bytes per second that `threads` threads read from memory: a buffer far beyond the caches, huge pages where the system
// gives them. On a shared machine the rate comes and goes: what is to be a share of it takes turns with Now().
class ReadLimit {
 public:
  // Finds the fastest of several access patterns. Throws ResourceError.
  ReadLimit(int threads, const IsaTable& isa);
  ~ReadLimit();

  double Best() const noexcept;  // of all passes of the search
  double Now();                  // of one more pass over the fastest pattern, some milliseconds

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Products per second that `threads` threads do of one of attention's dots, all operands in registers.
class DotLimit {
 public:
  DotLimit(int threads, const IsaTable& isa);
  ~DotLimit();

  double Now(Dot dot);  // the best of a few passes, a millisecond

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ReadLimit's Best().
double MeasureReadBandwidth(int threads, const IsaTable& isa);

// Operations per second (two per multiply-add) of the unit's bf16 dot and f32 multiply-add, with all operands in
// registers, and of its exact integer dots of blocks of 8- and 4-bit codes, with operands in L1. On units without a
// bf16 instruction the bf16 dot is an f32 multiply-add.
double MeasureBf16DotPeak(int threads, const IsaTable& isa);
double MeasureF32FmaPeak(int threads, const IsaTable& isa);
double MeasureInt8DotPeak(int threads, const IsaTable& isa);
double MeasureInt4DotPeak(int threads, const IsaTable& isa);

}  // namespace kvanta::kernels
