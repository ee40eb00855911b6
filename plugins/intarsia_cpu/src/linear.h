// Linear layers over weights in panels: y = x w^T + bias, for any number of rows.
//
// A panel holds PANEL outputs. It is a stream of steps; a step holds one 4-byte word for each of its outputs, so that a
// vector of words lies against one word of activations, broadcast:
//
//   FP32  one float                    INT8  four weights + 128, as bytes
//   BF16  two bf16                     INT4  eight weights: four low nibbles, then the four high ones
//
// Each output is one chain of accumulations along its columns in order, whatever rows stand beside it and whoever
// computes it: a row's result is the same bits in any batch, on any number of threads.
//
// Shape legend: R rows, C columns (in features), N outputs, G groups of columns.
#pragma once

#include "activations.h"
#include "threads.h"
#include "linear_tiles.h"
#include "vmath.h"

namespace linear {

enum class Activation : int32_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

/// Where a linear layer's results go, and what happens to them on the way:
/// value = activation(product + bias), or activation(gate) * up; then `data = value`, or `data += factor * value`.
struct Output {
  void* data;        // (R, N), float or bf16
  int64_t stride;    // numbers from row to row
  int32_t is_bf16;   // whether `data` is
  int32_t adds;      // whether values are added to what is there
  Activation activation;
  float factor;      // multiplies what is added
};

static INLINE F activate(Activation activation, F value) {
  if (activation == Activation::SILU) return vmath::silu(value);
  if (activation == Activation::GELU_TANH) return vmath::gelu_tanh(value);
  return value;
}

template <class T>
static INLINE void put(T* target, F value, int count, bool adds, F factor) {
  if (count >= LANES) {
    isa::store(target, adds ? isa::fma(value, factor, isa::load(target)) : value);
  } else {
    isa::store(target, adds ? isa::fma(value, factor, isa::load(target, count)) : value, count);
  }
}

/// Write `num_rows` rows of a tile; `gates` is the gate's tile where the layer is gated, else null.
template <class T>
static void finish(const Linear& layer, const Output& out, int64_t row, int num_rows, int64_t panel, const float* tile,
                   const float* gates) {
  const int64_t column = panel * PANEL;
  const int count = (int)(layer.outs - column < PANEL ? layer.outs - column : PANEL);
  const F factor = isa::set(out.factor);
  for (int r = 0; r < num_rows; r++) {
    T* target = (T*)out.data + (row + r) * out.stride + column;
    for (int i = 0; i < count; i += LANES) {
      const int left = count - i < LANES ? count - i : LANES;
      F value = isa::load(tile + r * PANEL + i);
      if (layer.bias != nullptr) value = value + isa::load(layer.bias + (gates ? layer.outs : 0) + column + i, left);
      if (gates != nullptr) {
        F gate = isa::load(gates + r * PANEL + i);
        if (layer.bias != nullptr) gate = gate + isa::load(layer.bias + column + i, left);
        value = activate(out.activation, gate) * value;
      } else {
        value = activate(out.activation, value);
      }
      put(target + i, value, left, out.adds != 0, factor);
    }
  }
}

/// Rows `begin` to `end` of one panel (of a pair of panels where the layer is gated).
static void panel_rows(const Linear& layer, const Activations& x, const Output& out, Range rows, int64_t panel) {
  alignas(64) float tile[MAX_ROWS * PANEL], gates[MAX_ROWS * PANEL];
  const int64_t next_panel = panel_bytes(layer) * (layer.gated ? 2 : 1);
  const int64_t num_tiles = (rows.end - rows.begin + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t i = 0; i < num_tiles; i++) {
    // Tiles of even height: 9 rows are 5 and 4.
    const Range part = share(rows.end - rows.begin, (int)i, (int)num_tiles);
    const int64_t row = rows.begin + part.begin;
    const int num_rows = (int)(part.end - part.begin);
    // One tile waits for memory: what it needs soon is fetched. Of several, the first wait, and each of them fetches a
    // third of the next panel.
    const Ahead ahead = num_tiles == 1 ? Ahead{4096, true} : Ahead{i < 3 ? next_panel + 64 * i : 0, false};
    if (layer.gated) {
      compute_tile(layer, x, row, num_rows, 2 * panel, ahead, gates);
      compute_tile(layer, x, row, num_rows, 2 * panel + 1, ahead, tile);
    } else {
      compute_tile(layer, x, row, num_rows, panel, ahead, tile);
    }
    const float* gate = layer.gated ? gates : nullptr;
    if (out.is_bf16) {
      finish<bf16_t>(layer, out, row, num_rows, panel, tile, gate);
    } else {
      finish<float>(layer, out, row, num_rows, panel, tile, gate);
    }
  }
}

/// Rows that share one pass over the panels: few enough to stay in L2 beside a panel, many enough to pay for it.
static inline int64_t rows_a_block(const Activations& x) {
  const int64_t fitting = (256 << 10) / (x.row_bytes > 0 ? x.row_bytes : 1);
  return fitting < 16 ? 16 : fitting > 96 ? 96 : fitting;
}

/// This thread's share of a linear layer over rows 0 to `num_rows` of prepared activations. No barrier inside.
static void linear_part(const Linear& layer, const Activations& x, int64_t num_rows, const Output& out, int thread,
                        int num_threads) {
  const int64_t num_panels = (layer.outs + PANEL - 1) / PANEL;
  const int64_t most = rows_a_block(x), num_blocks = (num_rows + most - 1) / most;
  // Units of work are (block of rows, panel), block by block: few rows are split by panels, many by rows.
  const Range units = share(num_blocks * num_panels, thread, num_threads);
  const int64_t num_groups = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t unit = units.begin; unit < units.end; unit++) {
    const Range groups = share(num_groups, (int)(unit / num_panels), (int)num_blocks);
    const int64_t end = groups.end * MAX_ROWS;
    panel_rows(layer, x, out, {groups.begin * MAX_ROWS, end < num_rows ? end : num_rows}, unit % num_panels);
  }
}

}  // namespace linear
