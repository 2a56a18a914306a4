// The tile kernels of the 16- and 32-bit storages, and the tables that choose a kernel.
#include "linear_tile.h"

namespace kt {

TileFn quantised_tile(int storage, int rows);  // linear_tile_int.cpp

namespace {

// kPanels 0: as many as suit the rows.
template <class F, int kPanels, int R = 1>
TileFn pick(int rows) {
  if constexpr (R < kTileRows)
    if (rows != R) return pick<F, kPanels, R + 1>(rows);
  return tile<F, R, kPanels ? kPanels : tile_panels(R)>;
}

}  // namespace

TileFn direct_tile(int storage, int rows) {
  switch (storage) {
    case kFp32: return pick<Elements<float>, 0>(rows);
    case kBf16: return pick<Elements<bf16>, 0>(rows);
    case kFp16: return pick<Elements<f16>, 0>(rows);
    default: return quantised_tile(storage, rows);
  }
}

TileFn wide_tile(int rows, int used) {
  if constexpr (kWidePanels > 1)
    if (used <= kWidePanels / 2) return pick<Elements<float>, kWidePanels / 2>(rows);
  return pick<Elements<float>, kWidePanels>(rows);
}

}  // namespace kt
