// Row kernels, written once over the Vec16 of the including ISA unit.
#pragma once

#include <cstdint>

#include "kernels/activation.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {
namespace {

// Calls step(i, n) for every 16 elements, n = 16, and once with fewer for the rest.
template <class Step>
KVANTA_INLINE void ForLanes(int64_t count, Step step) {
  int64_t i = 0;
  for (; i + Vec16::kLanes <= count; i += Vec16::kLanes) step(i, Vec16::kLanes);
  if (i < count) step(i, static_cast<int>(count - i));
}

KVANTA_INLINE Vec16::F LoadVec16(const float* p, int n) {
  return n == Vec16::kLanes ? Vec16::Load(p) : Vec16::LoadTail(p, n);
}

KVANTA_INLINE void StoreVec16(float* p, Vec16::F v, int n) {
  if (n == Vec16::kLanes) {
    Vec16::Store(p, v);
  } else {
    Vec16::StoreTail(p, v, n);
  }
}

void RmsNormRow(const float* x, const float* weight, float eps, int64_t width, float* out) noexcept {
  Vec16::F squares = Vec16::Zero();
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Vec16::F v = LoadVec16(x + i, n);
        squares = Vec16::Fma(v, v, squares);
      });
  const float mean = Vec16::Sum(squares) / static_cast<float>(width);
  const Vec16::F factor = Vec16::Div(Vec16::Set1(1.0f), Vec16::Sqrt(Vec16::Set1(mean + eps)));
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        StoreVec16(out + i, Vec16::Mul(Vec16::Mul(LoadVec16(x + i, n), factor), LoadVec16(weight + i, n)), n);
      });
}

void AddRow(float* x, const float* y, int64_t n) noexcept {
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        StoreVec16(x + i, Vec16::Add(LoadVec16(x + i, lanes), LoadVec16(y + i, lanes)), lanes);
      });
}

void MulRow(float* x, const float* y, int64_t n) noexcept {
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        StoreVec16(x + i, Vec16::Mul(LoadVec16(x + i, lanes), LoadVec16(y + i, lanes)), lanes);
      });
}

void RopeRow(float* x, int heads, int head_dim, int half, const float* cos_sin) noexcept {
  for (int head = 0; head < heads; ++head) {
    float* low = x + int64_t{head} * head_dim;
    float* high = low + half;
    ForLanes(
        half, [&](int64_t i, int n) __attribute__((always_inline)) {
          const Vec16::F cos = LoadVec16(cos_sin + i, n), sin = LoadVec16(cos_sin + half + i, n);
          const Vec16::F a = LoadVec16(low + i, n), b = LoadVec16(high + i, n);
          StoreVec16(low + i, Vec16::Sub(Vec16::Mul(a, cos), Vec16::Mul(b, sin)), n);
          StoreVec16(high + i, Vec16::Add(Vec16::Mul(b, cos), Vec16::Mul(a, sin)), n);
        });
  }
}

void RopeInterleavedRow(float* x, int heads, int head_dim, int half, const float* cos_sin) noexcept {
  for (int head = 0; head < heads; ++head) {
    float* pair = x + int64_t{head} * head_dim;
    for (int i = 0; i < half; ++i, pair += 2) {
      const float cos = cos_sin[i], sin = cos_sin[half + i];
      const float a = pair[0], b = pair[1];
      pair[0] = a * cos - b * sin;
      pair[1] = b * cos + a * sin;
    }
  }
}

void SiluMulRow(const float* gate, const float* up, int64_t width, float* out) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f);
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Vec16::F g = LoadVec16(gate + i, n);
        const Vec16::F silu = Vec16::Div(g, Vec16::Add(one, Vec16::Exp(Vec16::Sub(Vec16::Zero(), g))));
        StoreVec16(out + i, Vec16::Mul(silu, LoadVec16(up + i, n)), n);
      });
}

void GeluMulRow(const float* gate, const float* up, int64_t width, float* out) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f), linear = Vec16::Set1(kGeluLinear), cubic = Vec16::Set1(kGeluCubic);
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Vec16::F g = LoadVec16(gate + i, n);
        const Vec16::F exponent = Vec16::Mul(g, Vec16::Add(Vec16::Mul(Vec16::Mul(g, g), cubic), linear));
        const Vec16::F gelu = Vec16::Div(g, Vec16::Add(one, Vec16::Exp(exponent)));
        StoreVec16(out + i, Vec16::Mul(gelu, LoadVec16(up + i, n)), n);
      });
}

void SwigluOaiMulRow(const float* gate, const float* up, int64_t width, float* out) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f), alpha = Vec16::Set1(-kSwigluOaiAlpha);
  const Vec16::F max = Vec16::Set1(kSwigluOaiLimit), min = Vec16::Set1(-kSwigluOaiLimit);
  ForLanes(
      width, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Vec16::F g = Vec16::Min(max, LoadVec16(gate + i, n));  // in this order, NaN stays NaN
        const Vec16::F u = Vec16::Max(min, Vec16::Min(max, LoadVec16(up + i, n)));
        const Vec16::F swish = Vec16::Div(g, Vec16::Add(one, Vec16::Exp(Vec16::Mul(g, alpha))));
        StoreVec16(out + i, Vec16::Mul(Vec16::Add(u, one), swish), n);
      });
}

void AddScaledRow(float* x, const float* y, float factor, int64_t n) noexcept {
  const Vec16::F factors = Vec16::Set1(factor);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec16::F scaled = Vec16::Mul(LoadVec16(y + i, lanes), factors);
        StoreVec16(x + i, Vec16::Add(LoadVec16(x + i, lanes), scaled), lanes);
      });
}

void ScaleRow(float* x, float factor, int64_t n) noexcept {
  const Vec16::F factors = Vec16::Set1(factor);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        StoreVec16(x + i, Vec16::Mul(LoadVec16(x + i, lanes), factors), lanes);
      });
}

void MulSigmoidRow(float* x, const float* gate, int64_t n) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec16::F e = Vec16::Exp(Vec16::Sub(Vec16::Zero(), LoadVec16(gate + i, lanes)));
        StoreVec16(x + i, Vec16::Div(LoadVec16(x + i, lanes), Vec16::Add(one, e)), lanes);
      });
}

// tanh(y) = 1 - 2 / (exp(2 y) + 1).
void SoftcapRow(float* x, float softcap, int64_t n) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f), two = Vec16::Set1(2.0f);
  const Vec16::F cap = Vec16::Set1(softcap), twice_inverse = Vec16::Set1(2.0f / softcap);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec16::F e = Vec16::Exp(Vec16::Mul(LoadVec16(x + i, lanes), twice_inverse));
        StoreVec16(x + i, Vec16::Mul(cap, Vec16::Sub(one, Vec16::Div(two, Vec16::Add(e, one)))), lanes);
      });
}

void ExpRow(const float* x, int64_t count, float* out) noexcept {
  ForLanes(
      count, [&](int64_t i, int n)
                 __attribute__((always_inline)) { StoreVec16(out + i, Vec16::Exp(LoadVec16(x + i, n)), n); });
}

float MaxOfRow(const float* x, int64_t count) noexcept {
  Vec16::F max = Vec16::Set1(-__builtin_inff());
  Vec16::F checks = Vec16::Zero();  // NaN after 0 times an infinity or NaN
  const Vec16::F zero = Vec16::Zero();
  int64_t i = 0;
  for (; i + Vec16::kLanes <= count; i += Vec16::kLanes) {
    const Vec16::F v = Vec16::Load(x + i);
    max = Vec16::Max(max, v);
    checks = Vec16::Fma(v, zero, checks);
  }
  float max_of_row = Vec16::MaxOf(max), check = Vec16::Sum(checks);
  for (; i < count; ++i) {
    max_of_row = x[i] > max_of_row ? x[i] : max_of_row;
    check += 0 * x[i];
  }
  return check == 0 ? max_of_row : __builtin_nanf("");
}

constexpr RowKernels kRowKernels{.rms_norm = RmsNormRow,
                                 .add = AddRow,
                                 .mul = MulRow,
                                 .rope = RopeRow,
                                 .rope_interleaved = RopeInterleavedRow,
                                 .silu_mul = SiluMulRow,
                                 .gelu_mul = GeluMulRow,
                                 .swiglu_oai_mul = SwigluOaiMulRow,
                                 .add_scaled = AddScaledRow,
                                 .scale = ScaleRow,
                                 .mul_sigmoid = MulSigmoidRow,
                                 .softcap = SoftcapRow,
                                 .max = MaxOfRow,
                                 .exp = ExpRow};

}  // namespace
}  // namespace kvanta::kernels
