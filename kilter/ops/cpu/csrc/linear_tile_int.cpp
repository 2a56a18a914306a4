// The tile kernels of the 8- and 4-bit storages.
#include "linear_tile.h"

namespace kt {

TileFn quantised_tile(int storage, int rows) {
  switch (storage) {
    case kInt8: return pick_tile<Int8<false>, false, kTileRows>(rows);
    case kInt8Min: return pick_tile<Int8<true>, false, kTileRows>(rows);
    default: return pick_tile<Int4, false, kTileRows>(rows);
  }
}

}  // namespace kt
