// The multiply-accumulate core: R rows times P panels of 16 outputs, over a run of k.
//
// acc[r][p] = fma(x[r][k], w[p][k], acc[r][p]) for k = k0, k0 + 1, ... : each output is one chain
// in k order, whatever R, P and the storage, so the choice of tile never shows in the result.
// Halved tiles round both factors to bf16 and take k in the order of pairs.h.
#pragma once
#include <utility>

#include "formats.h"
#include "pairs.h"

namespace kt {

// Rows in the largest tile, and how many panels keep the registers full beside `rows` rows: there
// are 32 registers of 16 floats on AVX-512 and 16 of 8 on AVX2 (a panel is two).
#if KT_AVX512
constexpr int kTileRows = 12;
constexpr int tile_panels(int rows) { return rows <= 6 ? 4 : 2; }
constexpr int kWideRows = 6;
#elif KT_AVX2
constexpr int kTileRows = 6;
constexpr int tile_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int kWideRows = 6;
#else
constexpr int kTileRows = 3;
constexpr int tile_panels(int) { return 1; }
constexpr int kWideRows = 3;
#endif

// Weights to bring into L2 while computing on others: `bytes` from each of four places, `lines`
// cache lines for every eight k.
struct Ahead {
  const uint8_t* from[4];
  long bytes = 0;
  int lines = 0;
  int place = 0;
  long offset = 0;

  KT_INLINE void step() {
    for (int i = 0; i < lines; ++i) {
      __builtin_prefetch(from[place] + offset, 0, 2);
      offset += 64;
      if (offset >= bytes) {
        offset = 0;
        place = (place + 1) & 3;
      }
    }
  }
};

// x [R][ldx]: 4-byte words, fp32 numbers or what `halve_row` makes of them, the k-th at x[k], or
// x[k / 2] where a word is a pair. c [R][ldc]: where the tile's sums go; they start from c's own
// values if `resume`, else from 0.
using TileFn = void (*)(const Layout& w, const uint8_t* const* panels, const float* x, long ldx,
                        long k0, long k1, float* c, long ldc, bool resume, Ahead& ahead);

template <bool kHalved>
KT_INLINE f32x16 weight(f32x16 w) {
  return kHalved ? round_bf16(w) : w;
}

#if KT_PAIRS
// Weights j and j + 1 of eight.
template <class Eight>
KT_INLINE bf16x32 pair_of(const Eight& e, int j) {
  if constexpr (requires { e.raw(j); })
    return pair_up(e.raw(j));
  else
    return pair_up(e[j], e[j + 1]);
}
#endif

template <class F, int R, int P, bool kHalved>
void tile(const Layout& w, const uint8_t* const* panels, const float* x, long ldx, long k0,
          long k1, float* c, long ldc, bool resume, Ahead& ahead) {
  using Group = typename F::Group;
  f32x16 acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) acc[r][p] = resume ? load(c + r * ldc + p * 16) : zero();

  auto step = [&](const f32x16 (&v)[P], long k) KT_LAMBDA_INLINE {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const f32x16 a = set1(x[r * ldx + k]);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) acc[r][p] = fma(a, v[p], acc[r][p]);
    }
  };
#if KT_PAIRS
  auto step_pair = [&](const bf16x32 (&v)[P], long k) KT_LAMBDA_INLINE {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const bf16x32 a = set1_pair(x + r * ldx + k / 2);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) acc[r][p] = dot(a, v[p], acc[r][p]);
    }
  };
#endif
  auto run = [&](const Group* g, long base, long n) KT_LAMBDA_INLINE {
    long k = 0;
    for (; k + 8 <= n; k += 8) {
      ahead.step();
      [&]<size_t... I>(std::index_sequence<I...>) KT_LAMBDA_INLINE {
        const typename Group::Eight e[P] = {g[I].eight(k)...};
#if KT_PAIRS
        if constexpr (kHalved) {
#pragma GCC unroll 16
          for (int j = 0; j < 8; j += 2) {
            const bf16x32 v[P] = {pair_of(e[I], j)...};
            step_pair(v, base + k + j);
          }
          return;
        }
#endif
#pragma GCC unroll 16
        for (int j = 0; j < 8; ++j) {
          const f32x16 v[P] = {weight<kHalved>(e[I][kHalved ? j ^ 1 : j])...};
          step(v, base + k + j);
        }
      }(std::make_index_sequence<P>());
    }
    for (; k < n; k += kHalved ? kPairStep : 1) {
      [&]<size_t... I>(std::index_sequence<I...>) KT_LAMBDA_INLINE {
#if KT_PAIRS
        if constexpr (kHalved) {  // n is even
          const bf16x32 v[P] = {pair_up(g[I].one(k), g[I].one(k + 1))...};
          step_pair(v, base + k);
          return;
        }
#endif
        const long at = kHalved && (k ^ 1) < n ? k ^ 1 : k;
        const f32x16 v[P] = {weight<kHalved>(g[I].one(at))...};
        step(v, base + k);
      }(std::make_index_sequence<P>());
    }
  };
  const long stride = F::kGrouped ? w.group : k1 - k0;
  const uint8_t* at[P];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) at[p] = F::at(w, panels[p], k0);
  for (long k = k0; k < k1; k += stride) {
    [&]<size_t... I>(std::index_sequence<I...>) KT_LAMBDA_INLINE {
      const Group g[P] = {Group(w, at[I])...};
      run(g, k, std::min(stride, k1 - k));
    }(std::make_index_sequence<P>());
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) at[p] += w.group_bytes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) store(c + r * ldc + p * 16, acc[r][p]);
}

// The kernel for `rows` (1..kTileRows) rows reading a packed storage as it lies, tile_panels(rows)
// panels at a time. Halved ones take even stretches of k.
TileFn direct_tile(int storage, int rows);
TileFn halved_tile(int storage, int rows);
// The kernel for panels of words under many rows, kWidePanels at a time, the last `used` of them:
// fp32 numbers, or `pairs` of bf16.
constexpr int kWidePanels = tile_panels(kWideRows);
TileFn wide_tile(int rows, int used, bool pairs);

// kPanels 0: as many as suit the rows.
template <class F, bool kHalved, int kMost, int kPanels = 0, int R = 1>
TileFn pick_tile(int rows) {
  if constexpr (R < kMost)
    if (rows != R) return pick_tile<F, kHalved, kMost, kPanels, R + 1>(rows);
  return tile<F, R, kPanels ? kPanels : tile_panels(R), kHalved>;
}

}  // namespace kt
