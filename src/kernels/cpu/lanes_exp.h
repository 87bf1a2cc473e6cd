// exp(x) over the lanes of any ISA, included by each lanes_<isa>.h.
#pragma once

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Cody-Waite reduction x = n ln2 + r, |r| <= ln2/2, then the degree-5 polynomial of Cephes' expf for
// (e^r - 1 - r) / r^2. Within 2 ulp where the result is normal; -inf -> 0, overflow -> inf, NaN -> NaN.
template <class L>
KVANTA_INLINE typename L::F ExpOf(typename L::F x) {
  using F = typename L::F;
  // Beyond these the result is 0 or inf anyway. The variable is the second operand: x86's min and max return it for
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

}  // namespace
}  // namespace kvanta::kernels
