// Any storage to fp32 panels, and to bf16 in pairs: what the many-row kernel multiplies by, and
// (fp32) what dequantize shows.
#include "formats.h"
#include "pairs.h"

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
  __m256 x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = load8(in + i * stride);
  turn_8x8(x);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * 16, x[i]);
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

void halve(const Layout& w, long p, long k0, long k1, float* out) {
  constexpr long kRun = 64;
  alignas(64) float wide[kRun * 16];
#if KT_PAIRS
  if (w.storage == kBf16) {
    const bf16* in = (const bf16*)w.panel(p);
    for (; k0 + 2 <= k1; k0 += 2, out += 16) store(out, pair_up(in + k0 * 16));
  }
#endif
  for (; k0 < k1; k0 += kRun) {
    const long n = std::min(kRun, k1 - k0);
    widen(w, p, k0, k0 + n, wide);
#if KT_PAIRS
    for (long k = 0; k < n; k += 2, out += 16)
      store(out, pair_up(load(wide + k * 16), k + 1 < n ? load(wide + k * 16 + 16) : zero()));
#else
    for (long k = 0; k < n; ++k, out += 16)
      store(out, round_bf16(load(wide + ((k ^ 1) < n ? k ^ 1 : k) * 16)));
#endif
  }
}

}  // namespace kt
