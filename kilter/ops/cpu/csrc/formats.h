// How a weight matrix [N, K] lies in memory, and how its values are read.
//
// Packed: panels of 16 output rows, K-major. The rows come in `halves` equal parts (2 for
// [gate; up]), each padded to whole panels; a panel is, per storage format,
//
//   fp32, bf16, fp16    [K][16] elements
//   int8                per group of k: 16 scales, (16 mins,) [group][16] int8
//   int4                per group of k: 16 scales, 16 mins, [group / 8][16] words of 32 bits, of
//                       which bits 4j..4j+3 hold the q (0..15) of the word's j-th k
//
// with scales and mins fp16 or fp32 and the last group padded with zeros. Plain: the matrix as
// torch has it, rows or columns contiguous, packed panel by panel into scratch on every use.
//
// Whatever the format, a weight is one fp32 number, w = fma(q, scale, min) or q * scale, and
// everything downstream is arithmetic on that number.
#pragma once
#include "simd.h"

#include <algorithm>
#include <type_traits>

namespace kt {

enum Storage : int32_t {  // the numbers are packed.py's
  kFp32 = 0,
  kBf16 = 1,
  kFp16 = 2,
  kInt8 = 3,
  kInt8Min = 4,
  kInt4 = 5,
  kPlainFp32 = 6,
  kPlainBf16 = 7,
  kPlainFp16 = 8,
};

struct KtMatrix {
  const uint8_t* data;
  int64_t n, k;
  int64_t stride_n, stride_k;  // plain: in elements, one of them 1
  int32_t storage, group, scale_bytes, halves;
};

// Sizes derived from a KtMatrix once per call.
struct Layout {
  const uint8_t* data;
  long n, k, stride_n, stride_k;
  int storage, group, scale_bytes;
  long half_rows, half_panels, panels;
  long group_bytes, panel_bytes;

  explicit Layout(const KtMatrix& m)
      : data(m.data), n(m.n), k(m.k), stride_n(m.stride_n), stride_k(m.stride_k),
        storage(m.storage), group(m.group), scale_bytes(m.scale_bytes),
        half_rows(m.n / m.halves), half_panels((half_rows + 15) / 16),
        panels(half_panels * m.halves), group_bytes(0), panel_bytes(0) {
    if (storage == kFp32) panel_bytes = k * 64;
    if (storage == kBf16 || storage == kFp16) panel_bytes = k * 32;
    if (storage == kInt8) group_bytes = 16 * scale_bytes + 16 * group;
    if (storage == kInt8Min) group_bytes = 32 * scale_bytes + 16 * group;
    if (storage == kInt4) group_bytes = 32 * scale_bytes + 8 * group;
    if (group_bytes) panel_bytes = (k + group - 1) / group * group_bytes;
  }
  bool plain() const { return storage >= kPlainFp32; }
  bool grouped() const { return group_bytes != 0; }
  // Bytes of a packed panel before its k-th weights (a group's first k).
  long offset(long i) const { return grouped() ? i / group * group_bytes : i * (panel_bytes / k); }
  const uint8_t* panel(long p) const { return data + p * panel_bytes; }
  // The matrix row of a panel's first lane, and how many of its lanes are rows.
  long row(long p) const { return p / half_panels * half_rows + p % half_panels * 16; }
  long lanes(long p) const { return std::min(16L, half_rows - p % half_panels * 16); }
};

KT_INLINE f32x16 load_scale(const uint8_t* p, int scale_bytes) {
  return scale_bytes == 2 ? load_f16((const uint16_t*)p) : load((const float*)p);
}

// A format says where a panel's k-th weights are (`at`; with groups, k is a group's first) and
// reads from there on: `one(k)` is the k-th vector of 16 weights, `eight(k)[j]` the (k + j)-th
// where k is a multiple of 8, sharing what eight of them share.
template <class T>
struct Elements {
  static constexpr bool kGrouped = false;
  KT_INLINE static const uint8_t* at(const Layout&, const uint8_t* panel, long k) {
    return panel + k * 16 * long(sizeof(T));
  }
  struct Group {
    const T* p;
    KT_INLINE Group(const Layout&, const uint8_t* at) : p((const T*)at) {}
    struct Eight {
      const T* p;
      KT_INLINE f32x16 operator[](int j) const { return load(p + j * 16); }
      KT_INLINE const bf16* raw(int j) const requires std::is_same_v<T, bf16> { return p + j * 16; }
    };
    KT_INLINE Eight eight(long k) const { return {p + k * 16}; }
    KT_INLINE f32x16 one(long k) const { return load(p + k * 16); }
  };
};

struct Grouped {
  static constexpr bool kGrouped = true;
  static constexpr long kAhead = 512;  // bytes; the processor alone is late on these short streams
  KT_INLINE static const uint8_t* at(const Layout& w, const uint8_t* panel, long k) {
    return panel + k / w.group * w.group_bytes;
  }
};

template <bool kMin>
struct Int8 : Grouped {
  struct Group {
    f32x16 scale, min;
    const int8_t* q;
    KT_INLINE Group(const Layout& w, const uint8_t* at) {
      scale = load_scale(at, w.scale_bytes);
      if constexpr (kMin) min = load_scale(at + 16 * w.scale_bytes, w.scale_bytes);
      q = (const int8_t*)at + (kMin ? 32 : 16) * w.scale_bytes;
    }
    KT_INLINE f32x16 one(long k) const {
      f32x16 v = load_i8(q + k * 16);
      if constexpr (kMin) return fma(v, scale, min);
      return v * scale;
    }
    struct Eight {
      const Group& g;
      long k;
      KT_INLINE f32x16 operator[](int j) const { return g.one(k + j); }
    };
    KT_INLINE Eight eight(long k) const {
      __builtin_prefetch(q + k * 16 + kAhead);
      __builtin_prefetch(q + k * 16 + kAhead + 64);
      return {*this, k};
    }
  };
};

struct Int4 : Grouped {
  struct Group {
    f32x16 scale, min;
    const uint8_t* q;
    KT_INLINE Group(const Layout& w, const uint8_t* at) {
      scale = load_scale(at, w.scale_bytes);
      min = load_scale(at + 16 * w.scale_bytes, w.scale_bytes);
      q = at + 32 * w.scale_bytes;
    }
    struct Eight {
      const Group& g;
#if KT_AVX512
      __m512i words;
      KT_INLINE f32x16 operator[](int j) const {
        // The permutation looks at the low four bits only: a table of the numbers 0..15.
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i i = j ? _mm512_srli_epi32(words, 4 * j) : words;
        return fma(f32x16{_mm512_permutexvar_ps(i, table)}, g.scale, g.min);
      }
#elif KT_AVX2
      __m256i a, b;
      KT_INLINE static __m256 nibble(__m256i words, int j) {
        __m256i i = j ? _mm256_srli_epi32(words, 4 * j) : words;
        if (j != 7) i = _mm256_and_si256(i, _mm256_set1_epi32(15));
        return _mm256_cvtepi32_ps(i);
      }
      KT_INLINE f32x16 operator[](int j) const {
        return fma(f32x16{nibble(a, j), nibble(b, j)}, g.scale, g.min);
      }
#else
      uint32_t words[16];
      KT_INLINE f32x16 operator[](int j) const {
        f32x16 v;
        for (int i = 0; i < 16; ++i) v.v[i] = float((words[i] >> (4 * j)) & 15u);
        return fma(v, g.scale, g.min);
      }
#endif
    };
    KT_INLINE Eight eight(long k) const {
      const uint8_t* p = q + k / 8 * 64;
      __builtin_prefetch(p + kAhead);
#if KT_AVX512
      return {*this, _mm512_loadu_si512(p)};
#elif KT_AVX2
      return {*this, _mm256_loadu_si256((const __m256i*)p),
              _mm256_loadu_si256((const __m256i*)(p + 32))};
#else
      Eight e{*this, {}};
      std::memcpy(e.words, p, 64);
      return e;
#endif
    }
    KT_INLINE f32x16 one(long k) const {
      float v[16];
      for (int i = 0; i < 16; ++i) {
        uint32_t word;
        std::memcpy(&word, q + k / 8 * 64 + i * 4, 4);
        v[i] = float((word >> (4 * (k % 8))) & 15u);
      }
      return fma(load(v), scale, min);
    }
  };
};

// Weights k0..k1 of panel p as fp32 [k1 - k0][16], for any storage.
void widen(const Layout& w, long p, long k0, long k1, float* out);
// The same as words of pairs.h: bf16 pairs [(k1 - k0 + 1) / 2][16] with the instruction, else
// rounded fp32 [k1 - k0][16] in the order of pairs. k0 is the first of a pair.
void halve(const Layout& w, long p, long k0, long k1, float* out);

}  // namespace kt
