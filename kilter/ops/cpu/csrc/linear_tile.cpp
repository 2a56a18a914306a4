// The tile kernels of the 16- and 32-bit storages, and the tables that choose a kernel.
#include "linear_tile.h"

namespace kt {

TileFn quantised_tile(int storage, int rows);  // linear_tile_int.cpp

namespace {

// kPanels 0: as many as suit the rows.
template <class F, int kPanels = 0>
TileFn pick(int rows) {
  switch (rows) {
    case 1: return tile<F, 1, kPanels ? kPanels : tile_panels(1)>;
    case 2: return tile<F, 2, kPanels ? kPanels : tile_panels(2)>;
    case 3: return tile<F, 3, kPanels ? kPanels : tile_panels(3)>;
    case 4: return tile<F, 4, kPanels ? kPanels : tile_panels(4)>;
    case 5: return tile<F, 5, kPanels ? kPanels : tile_panels(5)>;
    default: return tile<F, 6, kPanels ? kPanels : tile_panels(6)>;
  }
}

}  // namespace

TileFn direct_tile(int storage, int rows) {
  switch (storage) {
    case kFp32: return pick<Elements<float>>(rows);
    case kBf16: return pick<Elements<bf16>>(rows);
    case kFp16: return pick<Elements<f16>>(rows);
    default: return quantised_tile(storage, rows);
  }
}

TileFn wide_tile(int rows, int used) {
  if constexpr (kWidePanels > 1)
    if (used <= kWidePanels / 2) return pick<Elements<float>, kWidePanels / 2>(rows);
  return pick<Elements<float>, kWidePanels>(rows);
}

}  // namespace kt
