// The tile kernels of products in bf16, for all storages.
#include "linear_tile.h"

namespace kt {

TileFn halved_tile(int storage, int rows) {
  switch (storage) {
    case kFp32: return pick_tile<Elements<float>, true, kTileRows>(rows);
    case kBf16: return pick_tile<Elements<bf16>, true, kTileRows>(rows);
    case kFp16: return pick_tile<Elements<f16>, true, kTileRows>(rows);
    case kInt8: return pick_tile<Int8<false>, true, kTileRows>(rows);
    case kInt8Min: return pick_tile<Int8<true>, true, kTileRows>(rows);
    default: return pick_tile<Int4, true, kTileRows>(rows);
  }
}

}  // namespace kt
