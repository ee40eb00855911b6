// Tiles of int8 activations.
#include "linear_tiles.h"

namespace linear {

void integer_tile(Words words, int num_rows, const Tile& tile) {
  switch (words) {
    case Words::INT8: return run_tile<Words::INT8>(num_rows, tile);
    case Words::INT4: return run_tile<Words::INT4>(num_rows, tile);
    case Words::NIBBLES: return run_tile<Words::NIBBLES>(num_rows, tile);
    case Words::SPARSE_INT8: return run_tile<Words::SPARSE_INT8>(num_rows, tile);
    default: break;
  }
  if constexpr (isa::HAS_INT16_DOTS) {
    if (words == Words::INT8_AS_INT16) return run_tile<Words::INT8_AS_INT16>(num_rows, tile);
    if (words == Words::INT16) return run_tile<Words::INT16>(num_rows, tile);
  }
}

}  // namespace linear
