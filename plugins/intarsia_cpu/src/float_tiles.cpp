// Tiles of float and bf16 activations.
#include "linear_tiles.h"

namespace linear {

void float_tile(Words words, int num_rows, const Tile& tile) {
  switch (words) {
    case Words::BF16: return run_tile<Words::BF16>(num_rows, tile);
    case Words::FP32: return run_tile<Words::FP32>(num_rows, tile);
    case Words::INT8_AS_FP32: return run_tile<Words::INT8_AS_FP32>(num_rows, tile);
    case Words::INT4_AS_FP32: return run_tile<Words::INT4_AS_FP32>(num_rows, tile);
    case Words::SPARSE_BF16: return run_tile<Words::SPARSE_BF16>(num_rows, tile);
    case Words::SPARSE_FP32: return run_tile<Words::SPARSE_FP32>(num_rows, tile);
    default: break;
  }
  if constexpr (HAS_BF16_DOTS) {
    if (words == Words::INT8_AS_BF16) return run_tile<Words::INT8_AS_BF16>(num_rows, tile);
    if (words == Words::INT4_AS_BF16) return run_tile<Words::INT4_AS_BF16>(num_rows, tile);
  } else if (words == Words::BF16_AS_FP32) {
    return run_tile<Words::BF16_AS_FP32>(num_rows, tile);
  }
}

}  // namespace linear
