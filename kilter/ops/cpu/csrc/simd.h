// Sixteen fp32 lanes, the only vector type of the CPU kernels.
//
// Three back ends, one meaning: AVX-512 (one register), AVX2 + FMA (two), plain C++ (a loop the
// compiler may vectorise). Every operation is IEEE fp32 with explicit fused multiply-add and the
// reductions are fixed trees, so a kernel written on this type gives the same bits whichever back
// end it is compiled for. Compile with -ffp-contract=off: contraction is ours to choose.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KT_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KT_AVX2 1
#include <immintrin.h>
#endif

#define KT_INLINE inline __attribute__((always_inline))
#define KT_LAMBDA_INLINE __attribute__((always_inline))

namespace kt {

KT_INLINE float bf16_to_float(uint16_t h) {
  uint32_t u = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest, ties to even; NaN stays NaN.
KT_INLINE uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

KT_INLINE float f16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3ffu, u;
  if (exp == 31) {
    u = sign | 0x7f800000u | (man << 13);
  } else if (exp) {
    u = sign | ((exp + 112) << 23) | (man << 13);
  } else {  // zero or subnormal: exact in fp32 arithmetic
    float f = float(man) * 5.9604644775390625e-8f;
    std::memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest, ties to even, as the x86 instruction does it; NaN stays NaN.
KT_INLINE uint16_t float_to_f16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000u, man = u & 0x7fffffu;
  int exp = int((u >> 23) & 255u) - 112;  // rebased to half's bias
  if (exp == 143) return uint16_t(sign | 0x7c00u | (man ? 0x200u | (man >> 13) : 0u));
  if (exp >= 31) return uint16_t(sign | 0x7c00u);
  int shift = 13;
  if (exp <= 0) {  // subnormal half, or zero
    if (exp < -10) return uint16_t(sign);
    man |= 0x800000u;
    shift = 14 - exp;
    exp = 0;
  }
  uint32_t half = (uint32_t(exp) << 10) + (man >> shift);
  uint32_t rest = man & ((1u << shift) - 1u), tie = 1u << (shift - 1);
  return uint16_t(sign | (half + (rest > tie || (rest == tie && (half & 1u)))));
}

// Storage types of two bytes, so that a kernel can be written once for fp32, bf16 and fp16.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
KT_INLINE float to_float(float x) { return x; }
KT_INLINE float to_float(bf16 x) { return bf16_to_float(x.bits); }
KT_INLINE float to_float(f16 x) { return f16_to_float(x.bits); }

#if KT_AVX512

struct f32x16 {
  __m512 v;
};
KT_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
KT_INLINE f32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
KT_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
KT_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
KT_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
KT_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
KT_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
KT_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// b wins where either is NaN, as the x86 instruction has it; back ends agree.
KT_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
KT_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
KT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a < b ? x : y
KT_INLINE f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// n holds whole numbers in [-127, 128]: 2^n (2^-127 becomes 0, 2^128 becomes inf).
KT_INLINE f32x16 exp2_int(f32x16 n) {
  __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}
KT_INLINE f32x16 load_bf16(const uint16_t* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
KT_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
KT_INLINE f32x16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// The low (high) nibbles of 16 bytes as 0..15.
KT_INLINE f32x16 load_lo4(const uint8_t* p) {
  __m128i b = _mm_and_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(15));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b))};
}
KT_INLINE f32x16 load_hi4(const uint8_t* p) {
  __m128i b = _mm_srli_epi16(_mm_loadu_si128((const __m128i*)p), 4);
  b = _mm_and_si128(b, _mm_set1_epi8(15));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b))};
}

#elif KT_AVX2

struct f32x16 {
  __m256 a, b;
};
KT_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KT_INLINE f32x16 set1(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
KT_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KT_INLINE void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
#define KT_BINARY(name, op)                                      \
  KT_INLINE f32x16 name(f32x16 x, f32x16 y) {                    \
    return {op(x.a, y.a), op(x.b, y.b)};                         \
  }
KT_BINARY(operator+, _mm256_add_ps)
KT_BINARY(operator-, _mm256_sub_ps)
KT_BINARY(operator*, _mm256_mul_ps)
KT_BINARY(operator/, _mm256_div_ps)
KT_BINARY(max, _mm256_max_ps)
KT_BINARY(min, _mm256_min_ps)
#undef KT_BINARY
KT_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
KT_INLINE f32x16 select_lt(f32x16 p, f32x16 q, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
KT_INLINE __m256 exp2_half(__m256 n) {
  __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
KT_INLINE f32x16 exp2_int(f32x16 n) { return {exp2_half(n.a), exp2_half(n.b)}; }
KT_INLINE __m256 bf16_half(const uint16_t* p) {
  __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
KT_INLINE f32x16 load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
KT_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
KT_INLINE f32x16 load_i8(const int8_t* p) {
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}
KT_INLINE f32x16 widen_u8(__m128i b) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)))};
}
KT_INLINE f32x16 load_lo4(const uint8_t* p) {
  return widen_u8(_mm_and_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(15)));
}
KT_INLINE f32x16 load_hi4(const uint8_t* p) {
  __m128i b = _mm_srli_epi16(_mm_loadu_si128((const __m128i*)p), 4);
  return widen_u8(_mm_and_si128(b, _mm_set1_epi8(15)));
}

#else

struct f32x16 {
  float v[16];
};
#define KT_LANES for (int i = 0; i < 16; ++i)
KT_INLINE f32x16 set1(float a) {
  f32x16 r;
  KT_LANES r.v[i] = a;
  return r;
}
KT_INLINE f32x16 zero() { return set1(0.0f); }
KT_INLINE f32x16 load(const float* p) {
  f32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
KT_INLINE void store(float* p, f32x16 a) { std::memcpy(p, a.v, 64); }
#define KT_BINARY(name, expr)                    \
  KT_INLINE f32x16 name(f32x16 a, f32x16 b) {    \
    f32x16 r;                                    \
    KT_LANES r.v[i] = expr;                      \
    return r;                                    \
  }
KT_BINARY(operator+, a.v[i] + b.v[i])
KT_BINARY(operator-, a.v[i] - b.v[i])
KT_BINARY(operator*, a.v[i] * b.v[i])
KT_BINARY(operator/, a.v[i] / b.v[i])
KT_BINARY(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
KT_BINARY(min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef KT_BINARY
KT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  f32x16 r;
  KT_LANES r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
KT_INLINE f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  f32x16 r;
  KT_LANES r.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return r;
}
KT_INLINE f32x16 exp2_int(f32x16 n) {
  f32x16 r;
  KT_LANES {
    // NaN reaches here too (the caller puts it back); a cast of it would be undefined.
    int32_t e = n.v[i] == n.v[i] ? int32_t(n.v[i]) + 127 : 0;
    uint32_t u = uint32_t(e) << 23;
    std::memcpy(&r.v[i], &u, 4);
  }
  return r;
}
KT_INLINE f32x16 load_bf16(const uint16_t* p) {
  f32x16 r;
  KT_LANES r.v[i] = bf16_to_float(p[i]);
  return r;
}
KT_INLINE f32x16 load_f16(const uint16_t* p) {
  f32x16 r;
  KT_LANES r.v[i] = f16_to_float(p[i]);
  return r;
}
KT_INLINE f32x16 load_i8(const int8_t* p) {
  f32x16 r;
  KT_LANES r.v[i] = float(p[i]);
  return r;
}
KT_INLINE f32x16 load_lo4(const uint8_t* p) {
  f32x16 r;
  KT_LANES r.v[i] = float(p[i] & 15);
  return r;
}
KT_INLINE f32x16 load_hi4(const uint8_t* p) {
  f32x16 r;
  KT_LANES r.v[i] = float(p[i] >> 4);
  return r;
}
#undef KT_LANES

#endif

// Fixed trees over the 16 lanes: lane l with l+8, then l+4, l+2, l+1.
KT_INLINE float reduce_add(f32x16 a) {
  float t[16];
  store(t, a);
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; ++i) t[i] = t[i] + t[i + w];
  return t[0];
}
KT_INLINE float reduce_max(f32x16 a) {
  float t[16];
  store(t, a);
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}

KT_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  float t[16];
  store(t, a);
  for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(t[i]);
}

KT_INLINE void store_f16(uint16_t* p, f32x16 a) {
#if KT_AVX512
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
#elif KT_AVX2
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.b, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < 16; ++i) p[i] = float_to_f16(a.v[i]);
#endif
}

// The same load and store for each storage type.
KT_INLINE f32x16 load(const bf16* p) { return load_bf16(&p->bits); }
KT_INLINE f32x16 load(const f16* p) { return load_f16(&p->bits); }
KT_INLINE void store(bf16* p, f32x16 a) { store_bf16(&p->bits, a); }
KT_INLINE void store(f16* p, f32x16 a) { store_f16(&p->bits, a); }

// The first n <= 16 lanes; the others are read as `rest` and not written.
template <class T>
KT_INLINE f32x16 load_n(const T* p, long n, float rest = 0.0f) {
  if (n >= 16) return load(p);
  float t[16];
  for (long i = 0; i < 16; ++i) t[i] = i < n ? to_float(p[i]) : rest;
  return load(t);
}
template <class T>
KT_INLINE void store_n(T* p, long n, f32x16 a) {
  if (n >= 16) return store(p, a);
  T t[16];
  store(t, a);
  std::memcpy(p, t, size_t(n) * sizeof(T));
}

// e^c = p * 2^n for c in [-88, 89]. Range reduction by ln 2 in two parts and a degree-6 polynomial
// (Cephes expf); NaN stays NaN.
struct ExpParts {
  f32x16 p, n;
};
KT_INLINE ExpParts exp_parts(f32x16 c) {
  const f32x16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  f32x16 n = fma(c, set1(1.44269504088896341f), magic) - magic;
  f32x16 r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return {fma(p * r, r, r) + set1(1.0f), n};
}

// e^x, about 1 ulp on the normal range; 0 below -87.33 (no subnormal results), inf above 88.72;
// NaN stays NaN.
KT_INLINE f32x16 exp(f32x16 x) {
  // In this operand order NaN passes through the clamps.
  const ExpParts e = exp_parts(min(set1(89.0f), max(set1(-88.0f), x)));
  // The power in two halves: 2^128 itself is not an fp32 number.
  const f32x16 magic = set1(12582912.0f);
  f32x16 half = fma(e.n, set1(0.5f), magic) - magic;
  f32x16 y = (e.p * exp2_int(half)) * exp2_int(e.n - half);
  y = select_lt(x, set1(-87.33654f), zero(), y);
  return select_lt(set1(88.72284f), x, set1(INFINITY), y);
}

// e^x for x <= 0, with the bits of `exp` and fewer steps.
KT_INLINE f32x16 exp_down(f32x16 x) {
  const ExpParts e = exp_parts(max(set1(-88.0f), x));
  return select_lt(x, set1(-87.33654f), zero(), e.p * exp2_int(e.n));
}

#if KT_AVX512 || KT_AVX2
// Eight rows of eight, turned.
KT_INLINE void turn_8x8(__m256* x) {
  __m256 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    x[4 + j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}
#endif

}  // namespace kt
