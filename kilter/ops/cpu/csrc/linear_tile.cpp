// The tile kernels of the 16- and 32-bit storages, and the tables that choose a kernel.
#include "linear_tile.h"

namespace kt {

TileFn quantised_tile(int storage, int rows);  // linear_tile_int.cpp

TileFn direct_tile(int storage, int rows) {
  switch (storage) {
    case kFp32: return pick_tile<Elements<float>, kTileRows>(rows);
    case kBf16: return pick_tile<Elements<bf16>, kTileRows>(rows);
    case kFp16: return pick_tile<Elements<f16>, kTileRows>(rows);
    default: return quantised_tile(storage, rows);
  }
}

TileFn wide_tile(int rows, int used) {
  if constexpr (kWidePanels > 1)
    if (used <= kWidePanels / 2) return pick_tile<Elements<float>, kWideRows, kWidePanels / 2>(rows);
  return pick_tile<Elements<float>, kWideRows, kWidePanels>(rows);
}

}  // namespace kt
