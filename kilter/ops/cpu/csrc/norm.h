// The RMS norm's one reduction, shared by the norm kernel and the per-head norms of rope.
#pragma once
#include "simd.h"

namespace kt {

// 1 / sqrt(mean(x^2) + eps). Element i is summed in lane i % 16 of accumulator (i / 16) % 4.
KT_INLINE float rms_scale(const float* x, long n, float eps) {
  f32x16 sum[4] = {zero(), zero(), zero(), zero()};
  long i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) {
      f32x16 v = load(x + i + 16 * j);
      sum[j] = fma(v, v, sum[j]);
    }
  }
  for (int j = 0; i < n; i += 16, ++j) {
    f32x16 v = load_n(x + i, n - i);
    sum[j] = fma(v, v, sum[j]);
  }
  float total = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
  return 1.0f / std::sqrt(total / float(n) + eps);
}

// (x * scale) * weight, the weight being stored as w or as w - 1.
KT_INLINE f32x16 rms_apply(f32x16 x, float scale, f32x16 weight, bool zero_centred) {
  if (zero_centred) weight = set1(1.0f) + weight;
  return (x * set1(scale)) * weight;
}

// The gradient of x by that of rms_apply(x ...): with s the scale and h = grad * weight,
// dx = s h - x s^3 mean(h x). Adds grad * x * s, the weight's gradient, to dweight.
KT_INLINE void rms_grad(const float* x, const float* grad, const float* weight, long n, float eps,
                        bool zero_centred, float* dx, float* dweight) {
  const float scale = rms_scale(x, n, eps);
  const f32x16 s = set1(scale), one = set1(zero_centred ? 1.0f : 0.0f);
  f32x16 sum = zero();
  for (long i = 0; i < n; i += 16) {
    const f32x16 gx = load_n(grad + i, n - i) * load_n(x + i, n - i);
    sum = fma(gx, one + load_n(weight + i, n - i), sum);
    store_n(dweight + i, n - i, fma(gx, s, load_n(dweight + i, n - i)));
  }
  const f32x16 factor = set1(-scale * scale * scale * (reduce_add(sum) / float(n)));
  for (long i = 0; i < n; i += 16) {
    const f32x16 h = load_n(grad + i, n - i) * (one + load_n(weight + i, n - i));
    store_n(dx + i, n - i, fma(load_n(x + i, n - i), factor, h * s));
  }
}

// Adds the parts [parts][n] of a sum in order: the parts are cut by rows, never by threads.
KT_INLINE void add_parts(const float* parts, long count, long n, float* sum) {
  for (long i = 0; i < n; i += 16) {
    f32x16 total = load_n(parts + i, n - i);
    for (long p = 1; p < count; ++p) total = total + load_n(parts + p * n + i, n - i);
    store_n(sum + i, n - i, total);
  }
}

}  // namespace kt
