// exp(x) and 2^x over the Vec16 of any ISA; included by each vec16_<isa>.h.
#pragma once

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Cody-Waite reduction x = n ln2 + r, |r| <= ln2/2, then the degree-5 polynomial of Cephes' expf for
// (e^r - 1 - r) / r^2. Within 2 ulp where the result is normal; -inf -> 0, overflow -> inf, NaN -> NaN.
template <class L>
KVANTA_INLINE typename L::F ExpOf(typename L::F x) {
  using F = typename L::F;
  // Beyond these bounds the result is 0 or inf. The variable is the second operand: x86's min and max return it for
  // NaN.
  x = L::Max(L::Set1(-104.5f), x);
  x = L::Min(L::Set1(89.0f), x);
  const F n = L::Round(L::Mul(x, L::Set1(1.44269504088896341f)));
  F r = L::Fma(n, L::Set1(-0.693359375f), x);
  r = L::Fma(n, L::Set1(2.12194440e-4f), r);
  F p = L::Set1(1.9875691500e-4f);
  p = L::Fma(p, r, L::Set1(1.3981999507e-3f));
  p = L::Fma(p, r, L::Set1(8.3334519073e-3f));
  p = L::Fma(p, r, L::Set1(4.1665795894e-2f));
  p = L::Fma(p, r, L::Set1(1.6666665459e-1f));
  p = L::Fma(p, r, L::Set1(5.0000001201e-1f));
  p = L::Add(L::Fma(p, L::Mul(r, r), r), L::Set1(1.0f));
  return L::ScaleByPow2(p, n);
}

// 2^x of kCount vectors of x <= 0 at once, for the softmax, whose maximum is 1. Exactly 0 from -127 down. x = n + r
// with |r| <= 1/2 is exact, and a polynomial of degree 5 (minimax of the relative error, constant term 1) is within 1.5
// ulp down to -126. The vectors are interleaved to hide latency.
template <class L, int kCount>
KVANTA_INLINE void Exp2OfNegative(typename L::F* x) {
  using F = typename L::F;
  constexpr float kMagic = 0x1.8p23f;  // leaves integers in the low bits
  F shifted[kCount], r[kCount], p[kCount];
  const auto each = [](auto step) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) step(i);
  };
  // At -127 p is 1, whose exponent then becomes that of 0. The variable is the second operand: max returns it for NaN.
  each([&](int i) { r[i] = L::Max(L::Set1(-127.0f), x[i]); });
  each([&](int i) { shifted[i] = L::Add(r[i], L::Set1(kMagic)); });
  each([&](int i) { r[i] = L::Sub(r[i], L::Sub(shifted[i], L::Set1(kMagic))); });
  each([&](int i) { p[i] = L::Fma(L::Set1(0x1.5bba12p-10f), r[i], L::Set1(0x1.3cea88p-7f)); });
  each([&](int i) { p[i] = L::Fma(p[i], r[i], L::Set1(0x1.c6b752p-5f)); });
  each([&](int i) { p[i] = L::Fma(p[i], r[i], L::Set1(0x1.ebf9bcp-3f)); });
  each([&](int i) { p[i] = L::Fma(p[i], r[i], L::Set1(0x1.62e42ap-1f)); });
  each([&](int i) { p[i] = L::Fma(p[i], r[i], L::Set1(1.0f)); });
  each([&](int i) { x[i] = L::AddToExponent(p[i], shifted[i]); });
}

}  // namespace
}  // namespace kvanta::kernels
