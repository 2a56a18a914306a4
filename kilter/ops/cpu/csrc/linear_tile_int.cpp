// The tile kernels of the 8- and 4-bit storages.
#include "linear_tile.h"

namespace kt {

TileFn quantised_tile(int storage, int rows) {
  switch (storage) {
    case kInt8: return pick_tile<Int8<false>, kTileRows>(rows);
    case kInt8Min: return pick_tile<Int8<true>, kTileRows>(rows);
    default: return pick_tile<Int4, kTileRows>(rows);
  }
}

}  // namespace kt
