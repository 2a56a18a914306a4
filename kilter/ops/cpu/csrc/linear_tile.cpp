// The tile kernels of the 16- and 32-bit storages, and the tables that choose a kernel.
#include "linear_tile.h"

namespace kt {

TileFn quantised_tile(int storage, int rows);  // linear_tile_int.cpp

TileFn direct_tile(int storage, int rows) {
  switch (storage) {
    case kFp32: return pick_tile<Elements<float>, false, kTileRows>(rows);
    case kBf16: return pick_tile<Elements<bf16>, false, kTileRows>(rows);
    case kFp16: return pick_tile<Elements<f16>, false, kTileRows>(rows);
    default: return quantised_tile(storage, rows);
  }
}

namespace {

#if KT_PAIRS
// A panel of pairs: rows of words.
template <int R, int P>
void wide_pairs(const Layout&, const uint8_t* const* panels, const float* x, long ldx, long k0,
                long k1, float* c, long ldc, bool resume, Ahead& ahead) {
  f32x16 acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) acc[r][p] = resume ? load(c + r * ldc + p * 16) : zero();
  for (long k = k0; k < k1; ++k) {
    if (k % 8 == 0) ahead.step();
    bf16x32 v[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) v[p] = load_pairs((const float*)panels[p] + k * 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const bf16x32 a = set1_pair(x + r * ldx + k);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) acc[r][p] = dot(a, v[p], acc[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) store(c + r * ldc + p * 16, acc[r][p]);
}

template <int P, int R = 1>
TileFn pick_pairs(int rows) {
  if constexpr (R < kWideRows)
    if (rows != R) return pick_pairs<P, R + 1>(rows);
  return wide_pairs<R, P>;
}
#endif

template <int P>
TileFn pick_wide(int rows, [[maybe_unused]] bool pairs) {
#if KT_PAIRS
  if (pairs) return pick_pairs<P>(rows);
#endif
  return pick_tile<Elements<float>, false, kWideRows, P>(rows);
}

}  // namespace

TileFn wide_tile(int rows, int used, bool pairs) {
  if constexpr (kWidePanels > 1)
    if (used <= kWidePanels / 2) return pick_wide<kWidePanels / 2>(rows, pairs);
  return pick_wide<kWidePanels>(rows, pairs);
}

}  // namespace kt
