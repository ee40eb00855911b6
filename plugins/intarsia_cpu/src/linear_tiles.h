// Tiles: a few rows of activations against one panel of weights, held in registers along all columns.
#pragma once

#include <utility>

#include "activations.h"

namespace linear {

constexpr int PANEL = 48;
constexpr int VECTORS = PANEL / LANES;
// As many rows as registers hold accumulators for.
#if ISA_AVX512
constexpr int MAX_ROWS = 8;
#elif ISA_AVX2 || defined(__ARM_NEON)
constexpr int MAX_ROWS = 2;
#else
constexpr int MAX_ROWS = 1;
#endif
// Of int8, sums of a group and of all groups both. int4 keeps the latter in memory: it unpacks weights for more rows.
constexpr int MAX_INT8_ROWS = MAX_ROWS > 4 ? 4 : MAX_ROWS;
constexpr int64_t STEP_BYTES = 4 * PANEL;

/// What a tile asks to be brought into L2 while it walks a panel: from each step, `distance` bytes on, a whole step or a
/// line of it. The hardware alone leaves a third of the memory's bandwidth unused.
struct Ahead {
  int64_t distance;
  bool whole;
};

static INLINE void fetch(const uint8_t* weights, Ahead ahead) {
  isa::prefetch(weights + ahead.distance);
  if (ahead.whole) {
    UNROLL for (int64_t line = 64; line < STEP_BYTES; line += 64) isa::prefetch(weights + ahead.distance + line);
  }
}

template <int ROWS>
static void tile_fp32(const uint8_t* w, const Activations& x, int64_t row, int64_t ins, Ahead ahead,
                      float* out) {
  F sums[ROWS][VECTORS] = {};
  const uint8_t* rows = x.data + row * x.row_bytes;
  for (int64_t k = 0; k < ins; k++, w += STEP_BYTES) {
    F weights[VECTORS];
    fetch(w, ahead);
    UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = isa::load((const float*)w + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const F value = isa::as_float(isa::broadcast4(rows + r * x.row_bytes + 4 * k));
      UNROLL for (int v = 0; v < VECTORS; v++) isa::fma_into(sums[r][v], weights[v], value);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) isa::store(out + r * PANEL + v * LANES, sums[r][v]);
  }
}

template <int ROWS>
static void tile_bf16(const uint8_t* w, const Activations& x, int64_t row, int64_t ins, Ahead ahead,
                      float* out) {
  F sums[ROWS][VECTORS] = {};
  const uint8_t* rows = x.data + row * x.row_bytes;
  const int64_t steps = (ins + 1) / 2;
  for (int64_t k = 0; k < steps; k++, w += STEP_BYTES) {
    I weights[VECTORS];
    fetch(w, ahead);
    UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = isa::load_int(w + 4 * v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const I pair = isa::broadcast4(rows + r * x.row_bytes + 4 * k);
      UNROLL for (int v = 0; v < VECTORS; v++) isa::dot2_into(sums[r][v], weights[v], pair);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) isa::store(out + r * PANEL + v * LANES, sums[r][v]);
  }
}

/// Exact sums of a group's products: each is begun at minus what the weights' offset adds, then walks the columns.
/// int4 weights hold two steps of activations each, so a step of weights reads 8 bytes of a row and not 4.
template <int ROWS, bool IS_INT4>
static INLINE void sum_group(I (&sums)[ROWS][VECTORS], const uint8_t* w, const uint8_t* rows, int64_t row_bytes,
                             int64_t steps, Ahead ahead) {
  const I low = isa::set_int(0x0f0f0f0f);
  for (int64_t k = 0; k < steps; k++, w += STEP_BYTES, rows += IS_INT4 ? 8 : 4) {
    I weights[VECTORS], upper[VECTORS];
    fetch(w, ahead);
    UNROLL for (int v = 0; v < VECTORS; v++) {
      weights[v] = isa::load_int(w + 4 * v * LANES);
      if (IS_INT4) {
        upper[v] = (weights[v] >> 4) & low;
        weights[v] = weights[v] & low;
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      const I four = isa::broadcast4(rows + r * row_bytes);
      UNROLL for (int v = 0; v < VECTORS; v++) isa::dot4_into(sums[r][v], weights[v], four);
      if (IS_INT4) {
        const I next = isa::broadcast4(rows + r * row_bytes + 4);
        UNROLL for (int v = 0; v < VECTORS; v++) isa::dot4_into(sums[r][v], upper[v], next);
      }
    }
  }
}

/// out = sum over groups of (exact sum) * (activation scale), times the output's scale.
template <int ROWS>
static void tile_int8(const Linear& layer, const uint8_t* w, const Activations& x, int64_t row, int64_t panel,
                      Ahead ahead, float* out) {
  F totals[ROWS][VECTORS] = {};
  const uint8_t* rows = x.data + row * x.row_bytes;
  const int64_t steps = layer.group / 4;
  for (int64_t g = 0; g < x.num_groups; g++, w += steps * STEP_BYTES, rows += layer.group) {
    I sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const I begin = isa::set_int(-128 * x.sums[(row + r) * x.num_groups + g]);
      UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = begin;
    }
    sum_group<ROWS, false>(sums, w, rows, x.row_bytes, steps, ahead);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const F scale = isa::set(x.scales[(row + r) * x.num_groups + g]);
      UNROLL for (int v = 0; v < VECTORS; v++) totals[r][v] = isa::fma(isa::from_int(sums[r][v]), scale, totals[r][v]);
    }
  }
  const float* scales = (const float*)layer.scales + panel * PANEL;
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
      isa::store(out + r * PANEL + v * LANES, totals[r][v] * isa::load(scales + v * LANES));
    }
  }
}

/// out = sum over groups of (exact sum * activation scale) * (weight scale).
template <int ROWS, bool HAS_ZEROS>
static void tile_int4(const Linear& layer, const uint8_t* w, const Activations& x, int64_t row, int64_t panel,
                      Ahead ahead, float* out) {
  UNROLL for (int i = 0; i < ROWS * VECTORS; i++) isa::store(out + i * LANES, isa::zero());
  const uint8_t* rows = x.data + row * x.row_bytes;
  const int64_t steps = layer.group / 8;
  for (int64_t g = 0; g < x.num_groups; g++, w += steps * STEP_BYTES, rows += layer.group) {
    const int64_t at = (panel * x.num_groups + g) * PANEL;
    I sums[ROWS][VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const I zeros = HAS_ZEROS ? isa::load_uint8_int(layer.zeros + at + v * LANES) : isa::set_int(8);
      UNROLL for (int r = 0; r < ROWS; r++) sums[r][v] = zeros * isa::set_int(-x.sums[(row + r) * x.num_groups + g]);
    }
    sum_group<ROWS, true>(sums, w, rows, x.row_bytes, steps, ahead);
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const F scale = isa::load((const bf16_t*)layer.scales + at + v * LANES);
      UNROLL for (int r = 0; r < ROWS; r++) {
        float* total = out + r * PANEL + v * LANES;
        const F value = isa::from_int(sums[r][v]) * isa::set(x.scales[(row + r) * x.num_groups + g]);
        isa::store(total, isa::fma(value, scale, isa::load(total)));
      }
    }
  }
}

/// Bytes of one panel.
static inline int64_t panel_bytes(const Linear& layer) {
  switch (layer.format) {
    case Format::FP32: return layer.ins * STEP_BYTES;
    case Format::BF16: return (layer.ins + 1) / 2 * STEP_BYTES;
    case Format::INT8: return num_groups(layer) * layer.group / 4 * STEP_BYTES;
    case Format::INT4: return num_groups(layer) * layer.group / 8 * STEP_BYTES;
  }
  return 0;
}

template <int ROWS>
static __attribute__((noinline)) void tile_of(const Linear& layer, const Activations& x, int64_t row, int64_t panel,
                                              Ahead ahead, float* out) {
  const uint8_t* w = layer.panels + panel * panel_bytes(layer);
  if constexpr (ROWS > MAX_INT8_ROWS) {
    if (layer.format == Format::INT8) {
      constexpr int FIRST = (ROWS + 1) / 2;
      tile_of<FIRST>(layer, x, row, panel, ahead, out);
      return tile_of<ROWS - FIRST>(layer, x, row + FIRST, panel, ahead, out + FIRST * PANEL);
    }
  } else {
    if (layer.format == Format::INT8) return tile_int8<ROWS>(layer, w, x, row, panel, ahead, out);
  }
  if (layer.format == Format::INT4 && layer.zeros) return tile_int4<ROWS, true>(layer, w, x, row, panel, ahead, out);
  if (layer.format == Format::INT4) return tile_int4<ROWS, false>(layer, w, x, row, panel, ahead, out);
  if (layer.format == Format::BF16) return tile_bf16<ROWS>(w, x, row, layer.ins, ahead, out);
  tile_fp32<ROWS>(w, x, row, layer.ins, ahead, out);
}

using TileFunction = void (*)(const Linear&, const Activations&, int64_t, int64_t, Ahead, float*);
template <int... COUNTS>
static TileFunction tile_function(int num_rows, std::integer_sequence<int, COUNTS...>) {
  static constexpr TileFunction functions[] = {tile_of<COUNTS + 1>...};
  return functions[num_rows - 1];
}

/// Products of rows `row` to `row + num_rows` (at most MAX_ROWS) with a panel: (num_rows, PANEL) floats.
static inline void compute_tile(const Linear& layer, const Activations& x, int64_t row, int num_rows, int64_t panel,
                                Ahead ahead, float* out) {
  tile_function(num_rows, std::make_integer_sequence<int, MAX_ROWS>{})(layer, x, row, panel, ahead, out);
}

}  // namespace linear
