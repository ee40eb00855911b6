// Linear layers over weights in panels: y = x w^T + bias, for any number of rows.
//
// A panel holds PANEL outputs. It is a stream of steps; a step holds one 4-byte word for each of its outputs, so that a
// vector of words lies against one word of activations, broadcast:
//
//   FP32  one float
//   BF16  two bf16
//   INT8  four weights + 128, as bytes
//   INT4  eight weights: four low nibbles, then the four high ones; for float rows the even columns in the lower half of
//         the word from its lowest bits on, the odd ones in the upper half
//
// Panels of 2:4 sparse weights hold less, which becomes such words: see `sparse_tiles.h`.
//
// Integers can have a scale an output, or scales a group of columns, with zero points or minima. Rows become int8 with a
// scale a group (then sums of a group are exact), or stay floats and weights are widened to floats, which is exact.
//
// Each output is one chain of accumulations along its columns in order, whatever rows stand beside it and whoever
// computes it: a row's result is the same bits in any batch, on any number of threads.
//
// Shape legend: R rows, C columns (in features), N outputs, G groups of columns.
#pragma once

#include "activations.h"
#include "threads.h"
#include "linear_tiles.h"

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

/// The products of some outputs, with the output's scale and bias. `panel` counts those in memory, `column` is its first
/// output's bias.
static INLINE F scaled(const Linear& layer, const float* totals, int64_t panel, int64_t column, int i, int left) {
  F value = isa::load(totals + i);
  if (layer.scales != nullptr && layer.groups_a_scale == 0) {
    value = value * isa::load((const float*)layer.scales + panel * PANEL + i);
  }
  return layer.bias != nullptr ? value + isa::load(layer.bias + column + i, left) : value;
}

/// Bytes of one panel.
static inline int64_t panel_bytes(const Linear& layer) {
  const int64_t columns = columns_a_step(layer);
  return (layer.ins + columns - 1) / columns * step_bytes(words_of(layer));
}

/// Rows that share one pass over the panels, at most: a multiple of MAX_ROWS.
constexpr int64_t MAX_BLOCK_ROWS = 96;

/// Bytes of what stands for one panel of outputs: a pair of panels where the layer is gated.
static inline int64_t unit_bytes(const Linear& layer) { return panel_bytes(layer) * (layer.gated ? 2 : 1); }

/// Products of rows `begin` to `end` (at most MAX_BLOCK_ROWS) with one panel: (rows, PANEL) totals. `next` bytes on lies what
/// this thread reads after this panel.
void products(const Linear& layer, const Activations& x, Range rows, int64_t panel, int64_t next, float* totals);

/// Rows that share one pass over the panels: few enough to stay in L2 beside a panel, many enough to pay for it.
static inline int64_t rows_a_block(const Activations& x) {
  const int64_t fitting = (256 << 10) / (x.row_bytes > 0 ? x.row_bytes : 1) / MAX_ROWS * MAX_ROWS;
  return fitting < 16 ? 16 : fitting > MAX_BLOCK_ROWS ? MAX_BLOCK_ROWS : fitting;
}

/// The units of work that a thread has, of (block of rows, panel), block by block: few rows are split by panels, many by
/// rows.
static inline Range units_of(const Linear& layer, int64_t num_blocks, int thread, int num_threads) {
  return share(num_blocks * ((layer.outs + PANEL - 1) / PANEL), thread, num_threads);
}

/// Call `run(rows, panel, next)` for each of this thread's units of work on rows 0 to `num_rows`; `next` is for `products`.
///
/// `then` is the layer that runs next, or null: what this thread reads of it first is fetched on the way.
template <class Run>
static INLINE void each_unit(const Linear& layer, const Activations& x, int64_t num_rows, int thread, int num_threads,
                             const Linear* then, Run&& run) {
  const int64_t num_panels = (layer.outs + PANEL - 1) / PANEL;
  const int64_t most = rows_a_block(x), num_blocks = (num_rows + most - 1) / most;
  const Range units = units_of(layer, num_blocks, thread, num_threads);
  const int64_t num_groups = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t unit = units.begin; unit < units.end; unit++) {
    const int64_t panel = unit % num_panels, after = (unit + 1) % num_panels;
    int64_t next = (after - panel) * unit_bytes(layer);
    if (unit + 1 == units.end && then != nullptr) {
      const int64_t first = units_of(*then, 1, thread, num_threads).begin;
      next = then->panels + first * unit_bytes(*then) - (layer.panels + panel * unit_bytes(layer));
    }
    const Range groups = share(num_groups, (int)(unit / num_panels), (int)num_blocks);
    const int64_t end = groups.end * MAX_ROWS;
    run(Range{groups.begin * MAX_ROWS, end < num_rows ? end : num_rows}, panel, next);
  }
}

/// This thread's share of a linear layer over rows 0 to `num_rows` of prepared activations. No barrier inside.
void linear_part(const Linear& layer, const Activations& x, int64_t num_rows, const Output& out, int thread,
                        int num_threads, const Linear* then = nullptr);

/// The same without anything behind the product but scales and bias, a panel at a time: call `take(row, column, value,
/// count)` for each vector of a row's outputs, of which `count` are there. The layer has no gate.
template <class Take>
static void each_output(const Linear& layer, const Activations& x, int64_t num_rows, int thread, int num_threads, Take&& take) {
  each_unit(layer, x, num_rows, thread, num_threads, nullptr, [&](Range rows, int64_t panel, int64_t next) {
    alignas(64) float totals[MAX_BLOCK_ROWS * PANEL];
    products(layer, x, rows, panel, next, totals);
    const int64_t column = panel * PANEL;
    const int count = (int)(layer.outs - column < PANEL ? layer.outs - column : PANEL);
    for (int64_t row = rows.begin; row < rows.end; row++) {
      for (int i = 0; i < count; i += LANES) {
        const int left = count - i < LANES ? count - i : LANES;
        take(row, column + i, scaled(layer, totals + (row - rows.begin) * PANEL, panel, column, i, left), left);
      }
    }
  });
}

}  // namespace linear
