// Products of bf16 numbers, summed in fp32: what the instruction VDPBF16PS computes, everywhere.
//
// k is taken in pairs, of which the odd one is added first, then the even one, each by one fused
// multiply-add; numbers below 2^-126 count as zero. Where the processor has the instruction a pair
// is a 32-bit word with the even k in its lower half, and a panel's weights are 16 words a pair.
// Elsewhere the same sums come from fp32 numbers that are rounded beforehand, with the two of each
// pair changing places, so that the fp32 kernels do the rest. The bits are the same.
#pragma once
#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if KT_AVX512 && defined(__AVX512BF16__)
#define KT_PAIRS 1
#else
#define KT_PAIRS 0
#endif

namespace kt {

// k that one step of the many-row kernel takes, and one 4-byte word of x holds.
constexpr int kPairStep = KT_PAIRS ? 2 : 1;

// As `float_to_bf16`, and numbers below 2^-126 become zero.
KT_INLINE uint16_t flush_to_bf16(float f) {
  return std::fabs(f) < 1.17549435e-38f ? uint16_t(std::signbit(f) ? 0x8000 : 0) : float_to_bf16(f);
}

#if KT_PAIRS
struct bf16x32 {
  __m512i v;
};
KT_INLINE bf16x32 interleave(__m512i even_then_odd) {
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
      23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, even_then_odd)};
}
KT_INLINE bf16x32 pair_up(f32x16 even, f32x16 odd) {
  return interleave((__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v));
}
KT_INLINE bf16x32 pair_up(const bf16* p) { return interleave(_mm512_loadu_si512(p)); }
KT_INLINE bf16x32 load_pairs(const float* p) { return {_mm512_loadu_si512(p)}; }
KT_INLINE void store(float* p, bf16x32 a) { _mm512_storeu_si512(p, a.v); }
KT_INLINE bf16x32 set1_pair(const float* p) {
  int word;
  std::memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
KT_INLINE f32x16 dot(bf16x32 x, bf16x32 w, f32x16 sum) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)x.v, (__m512bh)w.v)};
}
#endif

// Rounded to bf16, as fp32.
KT_INLINE f32x16 round_bf16(f32x16 a) {
#if KT_AVX512
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), u,
                           _mm512_set1_epi32(0x400000));
  const __mmask16 tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(a.v), _mm512_set1_ps(1.17549435e-38f),
                                            _CMP_LT_OQ);
  r = _mm512_and_epi32(r, _mm512_set1_epi32(int(0xffff0000)));
  r = _mm512_mask_and_epi32(r, tiny, u, _mm512_set1_epi32(int(0x80000000)));
  return {_mm512_castsi512_ps(r)};
#elif KT_AVX2
  auto half = [](__m256 v) KT_LAMBDA_INLINE {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    r = _mm256_and_si256(r, _mm256_set1_epi32(int(0xffff0000)));
    const __m256i sign = _mm256_set1_epi32(int(0x80000000));
    const __m256 size = _mm256_castsi256_ps(_mm256_andnot_si256(sign, u));
    const __m256i tiny =
        _mm256_castps_si256(_mm256_cmp_ps(size, _mm256_set1_ps(1.17549435e-38f), _CMP_LT_OQ));
    return _mm256_castsi256_ps(_mm256_blendv_epi8(r, _mm256_and_si256(u, sign), tiny));
  };
  return {half(a.a), half(a.b)};
#else
  for (int i = 0; i < 16; ++i) a.v[i] = bf16_to_float(flush_to_bf16(a.v[i]));
  return a;
#endif
}

// n numbers of a row of x as the kernels take them; (n + kPairStep - 1) / kPairStep words.
template <class T>
inline void halve_row(const T* x, long n, float* out) {
#if KT_PAIRS
  uint16_t* half = (uint16_t*)out;
  long i = 0;
  if constexpr (sizeof(T) == 4)
    for (; i + 32 <= n; i += 32)
      _mm512_storeu_si512(half + i, (__m512i)_mm512_cvtne2ps_pbh(load(x + i + 16).v, load(x + i).v));
  for (; i < n; ++i) half[i] = flush_to_bf16(to_float(x[i]));
  if (n % 2) half[n] = 0;
#else
  for (long i = 0; i < n; ++i)
    out[(i ^ 1) < n ? i ^ 1 : i] = bf16_to_float(flush_to_bf16(to_float(x[i])));
#endif
}

// Numbers below 2^-126 are zero while it lives, in sums too, as the instruction has it.
class FlushTiny {
#if defined(__x86_64__)
 public:
  explicit FlushTiny(bool on) : before_(_mm_getcsr()) {
    if (on) _mm_setcsr(before_ | 0x8040);
  }
  ~FlushTiny() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
 public:
  explicit FlushTiny(bool) {}
#endif
};

}  // namespace kt
