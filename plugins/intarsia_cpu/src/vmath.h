// exp, sigmoid, tanh and the activations of vectors: one polynomial for every lane, tails included.
#pragma once

#include "isa.h"

namespace vmath {

using isa::F;
using isa::set;

/// e**x to about 2e-7 relative; 0 for -infinity, infinity past 88.73, NaN for NaN.
static INLINE F exp(F x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. The bounds lie where the result is 0 and infinity; NaN passes them.
  x = isa::max(set(-110.0f), isa::min(set(90.0f), x));
  const F n = isa::round(x * set(1.44269504f));
  F r = isa::fma(n, set(-0.693145752f), x);  // ln 2 in two parts; n times the first is exact
  r = isa::fma(n, set(-1.42860677e-6f), r);
  F p = set(1.38888889e-3f);  // 1 / 6!
  p = isa::fma(p, r, set(8.33333333e-3f));
  p = isa::fma(p, r, set(4.16666667e-2f));
  p = isa::fma(p, r, set(1.66666667e-1f));
  p = isa::fma(p, r, set(0.5f));
  p = isa::fma(p, r, set(1.0f));
  p = isa::fma(p, r, set(1.0f));
  return isa::scale(p, n);
}
/// 2**x for |x| <= 160: to about 1e-7 relative, or to 8e-5 where `ROUGH`. NaN for NaN. Minimax polynomials of the fraction;
/// 2**0 is exactly 1 unless rough.
template <bool ROUGH>
static INLINE F exp2(F x) {
  const F r = isa::fraction(x);
  F p;
  if (ROUGH) {
    p = set(7.80245215e-2f);
    p = isa::fma(p, r, set(2.26067156e-1f));
    p = isa::fma(p, r, set(6.95833564e-1f));
    p = isa::fma(p, r, set(9.99925196e-1f));
  } else {
    p = set(2.17022514e-4f);
    p = isa::fma(p, r, set(1.24396873e-3f));
    p = isa::fma(p, r, set(9.67884064e-3f));
    p = isa::fma(p, r, set(5.54833412e-2f));
    p = isa::fma(p, r, set(2.40229830e-1f));
    p = isa::fma(p, r, set(6.93147004e-1f));
    p = isa::fma(p, r, set(1.0f));
  }
  return isa::scale_floor(p, x);
}
/// The same for x <= 0, -infinity included: exactly 0 from -150 down, so that what weighs nothing changes no sum.
template <bool ROUGH>
static INLINE F exp2_below(F x) {
  return exp2<ROUGH>(isa::max(set(-160.0f), x));
}
static INLINE F sigmoid(F x) {
  return set(1.0f) / (set(1.0f) + exp(-x));
}
static INLINE F silu(F x) {
  return x / (set(1.0f) + exp(-x));
}
/// The same to about 2e-4 relative, which is far below what bf16 rounds away.
static INLINE F rough_silu(F x) {
  const F n = isa::max(set(-127.0f), isa::min(set(128.0f), x * set(-1.44269504f)));
  return x * isa::rough_reciprocal(set(1.0f) + exp2<true>(n));
}
/// To about 2e-7 relative; 1 and -1 at infinities. Near 0, where the difference below cancels, a polynomial (Moshier's
/// Cephes, tanhf).
static INLINE F tanh(F x) {
  const F far = set(1.0f) - set(2.0f) / (set(1.0f) + exp(x + x));
  const F square = x * x;
  F p = set(-5.70498872745e-3f);
  p = isa::fma(p, square, set(2.06390887954e-2f));
  p = isa::fma(p, square, set(-5.37397155531e-2f));
  p = isa::fma(p, square, set(1.33314422036e-1f));
  p = isa::fma(p, square, set(-3.33332819422e-1f));
  return isa::select(isa::abs(x) < set(0.625f), isa::fma(p * square, x, x), far);
}
/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))), which is x sigmoid(2 sqrt(2 / pi) (...)) (Hendrycks and Gimpel 2016).
static INLINE F gelu_tanh(F x) {
  const F inner = isa::fma(x * x * x, set(0.044715f), x);
  return x * sigmoid(inner * set(1.59576912f));
}

}  // namespace vmath
