// The register tiles of attention: keys turned to columns, scores = q * keys, out += p * values;
// and, made of them, what rows do that each see a range of keys.
//
// Each score is one chain over the head dimension and each output one chain over keys, in order,
// whatever the tile's size, so how rows are grouped never shows in the result.
#pragma once
#include <algorithm>
#include <type_traits>

#include "scratch.h"
#include "simd.h"

namespace kt {
namespace {

constexpr long kChunk = 256;             // keys per softmax chunk: part of the order of reduction
constexpr long kSub = 64;                // keys turned at a time
constexpr int kBlock = 6;                // rows of a register tile
constexpr long kScoreStride = kChunk + 16;  // not a power of two: rows fall into different sets
#if KT_AVX512
constexpr int kWide = 4;  // vectors of a register tile
#else
constexpr int kWide = 1;
#endif
constexpr long kPanel = 16 * kWide;

// Sixteen rows of sixteen 4-byte words, given by `load(i)`, turned: `emit(j, word j of every row)`.
#if KT_AVX512
template <class Load, class Emit>
KT_INLINE void turn_words(Load load, Emit emit) {
  __m512 t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    __m512 a = load(i).v, b = load(i + 1).v;
    t[i] = _mm512_unpacklo_ps(a, b);
    t[i + 1] = _mm512_unpackhi_ps(a, b);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512 x0 = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88);
    __m512 x1 = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    __m512 y0 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    __m512 y1 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    emit(j, f32x16{_mm512_shuffle_f32x4(x0, y0, 0x88)});
    emit(4 + j, f32x16{_mm512_shuffle_f32x4(x1, y1, 0x88)});
    emit(8 + j, f32x16{_mm512_shuffle_f32x4(x0, y0, 0xdd)});
    emit(12 + j, f32x16{_mm512_shuffle_f32x4(x1, y1, 0xdd)});
  }
}
KT_INLINE f32x16 low_bf16(f32x16 words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words.v), 16))};
}
KT_INLINE f32x16 high_bf16(f32x16 words) {
  return {_mm512_and_ps(words.v, _mm512_castsi512_ps(_mm512_set1_epi32(int(0xffff0000u))))};
}
#elif KT_AVX2
template <class Load, class Emit>
KT_INLINE void turn_words(Load load, Emit emit) {
  __m256 q[4][8];  // quarters: rows 0-7 and 8-15 of words 0-7, then of words 8-15
  for (int i = 0; i < 8; ++i) {
    f32x16 upper = load(i), lower = load(8 + i);
    q[0][i] = upper.a;
    q[1][i] = lower.a;
    q[2][i] = upper.b;
    q[3][i] = lower.b;
  }
  for (auto& quarter : q) turn_8x8(quarter);
  for (int j = 0; j < 8; ++j) {
    emit(j, f32x16{q[0][j], q[1][j]});
    emit(8 + j, f32x16{q[2][j], q[3][j]});
  }
}
KT_INLINE __m256 low_half(__m256 words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16));
}
KT_INLINE f32x16 low_bf16(f32x16 words) { return {low_half(words.a), low_half(words.b)}; }
KT_INLINE f32x16 high_bf16(f32x16 words) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u)));
  return {_mm256_and_ps(words.a, mask), _mm256_and_ps(words.b, mask)};
}
#else
template <class Load, class Emit>
KT_INLINE void turn_words(Load load, Emit emit) {
  f32x16 rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = load(i);
  for (int j = 0; j < 16; ++j) {
    f32x16 column;
    for (int i = 0; i < 16; ++i) column.v[i] = rows[i].v[j];
    emit(j, column);
  }
}
KT_INLINE f32x16 pick_bf16(f32x16 words, int shift) {
  uint32_t u[16];
  std::memcpy(u, words.v, 64);
  for (int i = 0; i < 16; ++i) words.v[i] = bf16_to_float(uint16_t(u[i] >> shift));
  return words;
}
KT_INLINE f32x16 low_bf16(f32x16 words) { return pick_bf16(words, 0); }
KT_INLINE f32x16 high_bf16(f32x16 words) { return pick_bf16(words, 16); }
#endif

// Sixteen keys to columns of a panel: out[j * kPanel + i] = keys[offset[i] + j], j < dim.
template <class T>
KT_INLINE void turn_keys(const T* keys, const long* offset, long dim, float* out) {
  long j = 0;
  if constexpr (std::is_same_v<T, bf16>)  // two elements are one word: half the shuffles
    for (; j + 32 <= dim; j += 32)
      turn_words([&](int i) { return load(reinterpret_cast<const float*>(keys + offset[i] + j)); },
                 [&](int word, f32x16 x) {
                   store(out + (j + 2 * word) * kPanel, low_bf16(x));
                   store(out + (j + 2 * word + 1) * kPanel, high_bf16(x));
                 });
  for (; j + 16 <= dim; j += 16)
    turn_words([&](int i) { return load(keys + offset[i] + j); },
               [&](int word, f32x16 x) { store(out + (j + word) * kPanel, x); });
  for (; j < dim; ++j)
    for (int i = 0; i < 16; ++i) out[j * kPanel + i] = to_float(keys[offset[i] + j]);
}

// scores[r][16 n + lane] = sum over j of q[r][j] * k[j][16 n + lane].
template <int MR, int NV>
void score_tile(const float* q, const float* k, long dim, float* scores) {
  f32x16 acc[MR][NV];
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) acc[r][n] = zero();
  for (long j = 0; j < dim; ++j, k += kPanel) {
    f32x16 key[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) key[n] = load(k + 16 * n);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      f32x16 query = set1(q[r * dim + j]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[r][n] = fma(query, key[n], acc[r][n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) store(scores + r * kScoreStride + 16 * n, acc[r][n]);
}

// acc[r][0, 16 NV) += p[r][key] * value(key)[0, 16 NV) for keys [begin, end) in order.
template <int MR, int NV, class Value>
KT_INLINE void value_tile(const float* p, long begin, long end, Value value, float* out,
                          long stride) {
  f32x16 acc[MR][NV];
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) acc[r][n] = load(out + r * stride + 16 * n);
  for (long key = begin; key < end; ++key) {
    const auto* v = value(key);
    f32x16 x[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) x[n] = load(v + 16 * n);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      f32x16 weight = set1(p[r * kScoreStride + key]);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[r][n] = fma(weight, x[n], acc[r][n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) store(out + r * stride + 16 * n, acc[r][n]);
}

template <int MR>
void score_rows(const float* q, const float* k, long dim, long begin, long end, float* scores) {
  for (long n = begin; n < end;) {  // vectors of 16 keys
    const float* panel = k + (n / kWide) * dim * kPanel + (n % kWide) * 16;
    if (kWide > 1 && n % kWide == 0 && n + kWide <= end) {
      score_tile<MR, kWide>(q, panel, dim, scores + 16 * n);
      n += kWide;
    } else {
      score_tile<MR, 1>(q, panel, dim, scores + 16 * n);
      ++n;
    }
  }
}

using ScoreFn = void (*)(const float*, const float*, long, long, long, float*);
constexpr ScoreFn kScoreRows[kBlock + 1] = {nullptr,       score_rows<1>, score_rows<2>,
                                            score_rows<3>, score_rows<4>, score_rows<5>,
                                            score_rows<6>};

template <int MR, class Value>
KT_INLINE void value_wide(int vectors, const float* p, long begin, long end, Value value,
                          float* out, long stride) {
  if (vectors == kWide)
    value_tile<MR, kWide>(p, begin, end, value, out, stride);
  else
    for (int n = 0; n < vectors; ++n)
      value_tile<MR, 1>(p, begin, end, [=](long key) { return value(key) + 16 * n; },
                        out + 16 * n, stride);
}

template <class Value>
void value_rows(int rows, int vectors, const float* p, long begin, long end, Value value,
                float* out, long stride) {
  switch (rows) {
    case 1: return value_wide<1>(vectors, p, begin, end, value, out, stride);
    case 2: return value_wide<2>(vectors, p, begin, end, value, out, stride);
    case 3: return value_wide<3>(vectors, p, begin, end, value, out, stride);
    case 4: return value_wide<4>(vectors, p, begin, end, value, out, stride);
    case 5: return value_wide<5>(vectors, p, begin, end, value, out, stride);
    default: return value_wide<6>(vectors, p, begin, end, value, out, stride);
  }
}

// One key's values among those of kSub keys, widened to fp32 and laid out [panel][key][kPanel].
template <class T>
KT_INLINE void lay_values(const T* from, long dim, float* to) {
  const long full = dim / 16 * 16;
  for (long i = 0; i < full; i += 16)
    store(to + i / kPanel * kPanel * kSub + i % kPanel, load(from + i));
  if (full < dim)
    store(to + full / kPanel * kPanel * kSub + full % kPanel, load_n(from + full, dim - full));
}

// A panel of them.
struct Laid {
  const float* panel;
  const float* operator()(long key) const { return panel + key * kPanel; }
};

// Below, row m sees keys [low(m), high(m)) of kSub keys or more, numbers that grow with m and may
// lie beyond either end.

// The scores of `rows` rows with kSub turned keys, where they see them.
template <class Low, class High>
KT_INLINE void score_seen(long rows, const float* q, const float* keys, long dim, Low low,
                          High high, float* scores) {
  for (long m = 0; m < rows; m += kBlock) {
    const long height = std::min<long>(kBlock, rows - m);
    const long from = std::max(low(m), 0L) / 16;
    const long upto = (std::min(high(m + height - 1), kSub) + 15) / 16;
    if (from < upto)
      kScoreRows[height](q + m * dim, keys, dim, from, upto, scores + m * kScoreStride);
  }
}

// The largest of a row's scores [begin, end); around them, up to whole vectors, they become -inf.
KT_INLINE float top_score(float* scores, long begin, long end) {
  static constexpr float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const f32x16 lane = load(lanes), never = set1(-INFINITY);
  const long first = begin / 16 * 16, last = (end - 1) / 16 * 16;
  float *head = scores + first, *tail = scores + last;
  store(head, select_lt(lane, set1(float(begin - first)), never, load(head)));
  store(tail, select_lt(lane, set1(float(end - last)), load(tail), never));
  f32x16 top[2] = {load(head), load(tail)};
  for (long i = first; i + 16 <= last; i += 32)
    for (int j = 0; j < 2; ++j) top[j] = max(top[j], load(scores + i + 16 * j));
  return reduce_max(max(top[0], top[1]));
}

// Then p = exp(score - top) in their place; returns the sum, of 16 lanes.
KT_INLINE float probabilities(float* scores, long begin, long end, float top) {
  const f32x16 shift = set1(top);
  f32x16 sum = zero();
  for (long i = begin / 16 * 16; i < end; i += 16) {
    const f32x16 p = exp_down(load(scores + i) - shift);
    sum = sum + p;
    store(scores + i, p);
  }
  return reduce_add(sum);
}

// out[m][0, 16 vectors) += p[m] * values over kSub keys, every row over its own range: where the
// rows of a block differ, those keys are done row by row.
template <class Low, class High, class Value>
KT_INLINE void add_values(long rows, int vectors, const float* p, Low low, High high, Value value,
                          float* out, long stride) {
  for (long m = 0; m < rows; m += kBlock, p += kBlock * kScoreStride, out += kBlock * stride) {
    const long height = std::min<long>(kBlock, rows - m);
    const long begin = std::max(low(m + height - 1), 0L), end = std::min(high(m), kSub);
    const auto single = [&](long r, long from, long upto) {
      from = std::max(from, low(m + r));
      upto = std::min(upto, high(m + r));
      if (from < upto)
        value_rows(1, vectors, p + r * kScoreStride, from, upto, value, out + r * stride, stride);
    };
    if (begin >= end) {
      for (long r = 0; r < height; ++r) single(r, 0, kSub);
      continue;
    }
    if (begin > 0)
      for (long r = 0; r < height; ++r) single(r, 0, begin);
    value_rows(int(height), vectors, p, begin, end, value, out, stride);
    if (end < kSub)
      for (long r = 0; r < height; ++r) single(r, end, kSub);
  }
}

}  // namespace
}  // namespace kt
