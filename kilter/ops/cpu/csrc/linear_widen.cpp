// Any storage to fp32 panels: what the many-row kernel multiplies by, and what dequantize shows.
#include "formats.h"

namespace kt {
namespace {

template <class F>
void widen_packed(const Layout& w, long p, long k0, long k1, float* out) {
  const uint8_t* panel = w.panel(p);
  for (long k = k0; k < k1;) {
    // A run inside one group; `base` is the group's first k, where it can be stood at.
    const long base = F::kGrouped ? k / w.group * w.group : k;
    const long end = F::kGrouped ? std::min(k1, base + w.group) : k1;
    const typename F::Group g(w, F::at(w, panel, base));
    for (; k < end && (k - base) % 8; ++k, out += 16) store(out, g.one(k - base));
    for (; k + 8 <= end; k += 8, out += 128) {
      const auto e = g.eight(k - base);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) store(out + j * 16, e[j]);
    }
    for (; k < end; ++k, out += 16) store(out, g.one(k - base));
  }
}

#if KT_AVX512 || KT_AVX2
KT_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
KT_INLINE __m256 load8(const bf16* p) {
  __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
}
KT_INLINE __m256 load8(const f16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
// Eight rows `stride` apart, eight columns, to out[column][row], columns 16 floats apart.
template <class T>
KT_INLINE void transpose8(const T* in, long stride, float* out) {
  __m256 r[8], s[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = load8(in + i * stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
template <class T>
KT_INLINE void transpose8(const T* in, long stride, float* out) {
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 8; ++i) out[j * 16 + i] = to_float(in[i * stride + j]);
}
#endif

template <class T>
void widen_plain(const Layout& w, long p, long k0, long k1, float* out) {
  const long row = w.row(p), lanes = w.lanes(p);
  const T* in = (const T*)w.data + row * w.stride_n;
  if (lanes == 16 && w.stride_n == 1) {
    for (long k = k0; k < k1; ++k, out += 16) store(out, load(in + k * w.stride_k));
    return;
  }
  long k = k0;
  if (lanes == 16 && w.stride_k == 1) {
    for (; k + 8 <= k1; k += 8, out += 128) {
      transpose8(in + k, w.stride_n, out);
      transpose8(in + 8 * w.stride_n + k, w.stride_n, out + 8);
    }
  }
  for (; k < k1; ++k, out += 16)
    for (long i = 0; i < 16; ++i)
      out[i] = i < lanes ? to_float(in[i * w.stride_n + k * w.stride_k]) : 0.0f;
}

}  // namespace

void widen(const Layout& w, long p, long k0, long k1, float* out) {
  switch (w.storage) {
    case kFp32: return widen_packed<Elements<float>>(w, p, k0, k1, out);
    case kBf16: return widen_packed<Elements<bf16>>(w, p, k0, k1, out);
    case kFp16: return widen_packed<Elements<f16>>(w, p, k0, k1, out);
    case kInt8: return widen_packed<Int8<false>>(w, p, k0, k1, out);
    case kInt8Min: return widen_packed<Int8<true>>(w, p, k0, k1, out);
    case kInt4: return widen_packed<Int4>(w, p, k0, k1, out);
    case kPlainFp32: return widen_plain<float>(w, p, k0, k1, out);
    case kPlainBf16: return widen_plain<bf16>(w, p, k0, k1, out);
    case kPlainFp16: return widen_plain<f16>(w, p, k0, k1, out);
  }
}

}  // namespace kt
