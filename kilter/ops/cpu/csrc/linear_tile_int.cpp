// The tile kernels of the 8- and 4-bit storages.
#include "linear_tile.h"

namespace kt {
namespace {

template <class F>
TileFn pick(int rows) {
  switch (rows) {
    case 1: return tile<F, 1, tile_panels(1)>;
    case 2: return tile<F, 2, tile_panels(2)>;
    default: return tile<F, 3, tile_panels(3)>;
  }
}

}  // namespace

TileFn quantised_tile(int storage, int rows) {
  switch (storage) {
    case kInt8: return pick<Int8<false>>(rows);
    case kInt8Min: return pick<Int8<true>>(rows);
    default: return pick<Int4>(rows);
  }
}

}  // namespace kt
