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

}  // namespace kt
