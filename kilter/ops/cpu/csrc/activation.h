// The gate activations of gated MLPs, for the elementwise kernel and for fused epilogues.
#pragma once
#include "simd.h"

namespace kt {

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// x / (1 + e^-x)
KT_INLINE f32x16 silu(f32x16 x) { return x / (set1(1.0f) + exp(zero() - x)); }

// 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
KT_INLINE f32x16 gelu_tanh(f32x16 x) {
  f32x16 u = set1(0.7978845608028654f) * fma(set1(0.044715f) * (x * x), x, x);
  return x / (set1(1.0f) + exp(set1(-2.0f) * u));
}

KT_INLINE f32x16 activate(f32x16 x, int32_t kind) {
  return kind == kSilu ? silu(x) : gelu_tanh(x);
}

// activate(x) and its derivative, from s = sigmoid(z): x s, and s + x s (1 - s) dz/dx.
KT_INLINE void activate_grad(f32x16 x, int32_t kind, f32x16& value, f32x16& slope) {
  const f32x16 one = set1(1.0f);
  f32x16 z = x, dz = one;
  if (kind == kGeluTanh) {
    const f32x16 xx = x * x, c = set1(1.5957691216057308f);
    z = c * fma(set1(0.044715f) * xx, x, x);
    dz = c * fma(set1(3 * 0.044715f), xx, one);
  }
  const f32x16 s = one / (one + exp(zero() - z));
  value = x * s;
  slope = fma(value * (one - s), dz, s);
}

}  // namespace kt
