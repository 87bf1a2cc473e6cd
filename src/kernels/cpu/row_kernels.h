// Row kernels over the lanes of the including ISA unit.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/row_table.h"

namespace kvanta::kernels {
namespace {

// Calls step(i, n) for 16 lanes at a time: n = 16, and less once at the end.
template <class Step>
KVANTA_INLINE void ForLanes(int64_t count, Step step) {
  int64_t i = 0;
  for (; i + Lanes::kLanes <= count; i += Lanes::kLanes) step(i, Lanes::kLanes);
  if (i < count) step(i, static_cast<int>(count - i));
}

KVANTA_INLINE Lanes::F LoadLanes(const float* p, int n) {
  return n == Lanes::kLanes ? Lanes::Load(p) : Lanes::LoadTail(p, n);
}

KVANTA_INLINE void StoreLanes(float* p, Lanes::F v, int n) {
  if (n == Lanes::kLanes) {
    Lanes::Store(p, v);
  } else {
    Lanes::StoreTail(p, v, n);
  }
}

void RmsNormRow(const float* x, const float* weight, float eps, int64_t width, float* out) noexcept {
  Lanes::F squares = Lanes::Zero();
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Lanes::F v = LoadLanes(x + i, n);
        squares = Lanes::Fma(v, v, squares);
      });
  const float mean = Lanes::Sum(squares) / static_cast<float>(width);
  const Lanes::F factor = Lanes::Div(Lanes::Set1(1.0f), Lanes::Sqrt(Lanes::Set1(mean + eps)));
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        StoreLanes(out + i, Lanes::Mul(Lanes::Mul(LoadLanes(x + i, n), factor), LoadLanes(weight + i, n)), n);
      });
}

void AddRow(float* x, const float* y, int64_t n) noexcept {
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        StoreLanes(x + i, Lanes::Add(LoadLanes(x + i, lanes), LoadLanes(y + i, lanes)), lanes);
      });
}

void RopeRow(float* x, int heads, int head_dim, int half, const float* cos_sin) noexcept {
  for (int head = 0; head < heads; ++head) {
    float* low = x + int64_t{head} * head_dim;
    float* high = low + half;
    ForLanes(
        half, [&](int64_t i, int n) __attribute__((always_inline)) {
          const Lanes::F cos = LoadLanes(cos_sin + i, n), sin = LoadLanes(cos_sin + half + i, n);
          const Lanes::F a = LoadLanes(low + i, n), b = LoadLanes(high + i, n);
          StoreLanes(low + i, Lanes::Sub(Lanes::Mul(a, cos), Lanes::Mul(b, sin)), n);
          StoreLanes(high + i, Lanes::Add(Lanes::Mul(b, cos), Lanes::Mul(a, sin)), n);
        });
  }
}

void SiluMulRow(const float* gate, const float* up, int64_t width, float* out) noexcept {
  const Lanes::F one = Lanes::Set1(1.0f);
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Lanes::F g = LoadLanes(gate + i, n);
        const Lanes::F silu = Lanes::Div(g, Lanes::Add(one, Lanes::Exp(Lanes::Sub(Lanes::Zero(), g))));
        StoreLanes(out + i, Lanes::Mul(silu, LoadLanes(up + i, n)), n);
      });
}

void ExpRow(const float* x, int64_t count, float* out) noexcept {
  ForLanes(
      count, [&](int64_t i, int n)
                 __attribute__((always_inline)) { StoreLanes(out + i, Lanes::Exp(LoadLanes(x + i, n)), n); });
}

float LargestOfRow(const float* x, int64_t count) noexcept {
  Lanes::F peak = Lanes::Set1(-__builtin_inff());
  Lanes::F zero = Lanes::Zero();  // NaN after 0 times an infinity or NaN
  const Lanes::F nothing = Lanes::Zero();
  int64_t i = 0;
  for (; i + Lanes::kLanes <= count; i += Lanes::kLanes) {
    const Lanes::F v = Lanes::Load(x + i);
    peak = Lanes::Max(peak, v);
    zero = Lanes::Fma(v, nothing, zero);
  }
  float largest = Lanes::MaxOf(peak), check = Lanes::Sum(zero);
  for (; i < count; ++i) {
    largest = x[i] > largest ? x[i] : largest;
    check += 0 * x[i];
  }
  return check == 0 ? largest : __builtin_nanf("");
}

constexpr RowKernels kRowKernels{.rms_norm = RmsNormRow,
                                 .add = AddRow,
                                 .rope = RopeRow,
                                 .silu_mul = SiluMulRow,
                                 .largest = LargestOfRow,
                                 .exp = ExpRow};

}  // namespace
}  // namespace kvanta::kernels
