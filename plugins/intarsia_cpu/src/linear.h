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

/// `ROUGH`: for bf16.
template <bool ROUGH>
static INLINE F activate(Activation activation, F value) {
  if (activation == Activation::SILU) return ROUGH ? vmath::rough_silu(value) : vmath::silu(value);
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

/// The products of some outputs, with the output's scale and bias. `panel` counts those in memory, `column` is its first
/// output's bias.
static INLINE F scaled(const Linear& layer, const float* totals, int64_t panel, int64_t column, int i, int left) {
  F value = isa::load(totals + i);
  if (layer.scales != nullptr && layer.groups_a_scale == 0) {
    value = value * isa::load((const float*)layer.scales + panel * PANEL + i);
  }
  return layer.bias != nullptr ? value + isa::load(layer.bias + column + i, left) : value;
}

/// Write `num_rows` rows; `gates` are the gate's products where the layer is gated, else null.
template <class T>
static void finish(const Linear& layer, const Output& out, int64_t row, int64_t num_rows, int64_t panel,
                   const float* totals, const float* gates) {
  const int64_t column = panel * PANEL;
  const int count = (int)(layer.outs - column < PANEL ? layer.outs - column : PANEL);
  const F factor = isa::set(out.factor);
  constexpr bool ROUGH = std::is_same_v<T, bf16_t>;
  for (int64_t r = 0; r < num_rows; r++, totals += PANEL) {
    T* target = (T*)out.data + (row + r) * out.stride + column;
    for (int i = 0; i < count; i += LANES) {
      const int left = count - i < LANES ? count - i : LANES;
      F value;
      if (gates != nullptr) {
        const F gate = scaled(layer, gates + r * PANEL, 2 * panel, column, i, left);
        value = activate<ROUGH>(out.activation, gate) * scaled(layer, totals, 2 * panel + 1, layer.outs + column, i, left);
      } else {
        value = activate<ROUGH>(out.activation, scaled(layer, totals, panel, column, i, left));
      }
      put(target + i, value, left, out.adds != 0, factor);
    }
  }
}

/// Bytes of one panel.
static inline int64_t panel_bytes(const Linear& layer) {
  const int64_t columns = columns_a_step(layer);
  return (layer.ins + columns - 1) / columns * step_bytes(words_of(layer));
}

/// Rows that share one pass over the panels, at most: a multiple of MAX_ROWS.
constexpr int64_t MAX_BLOCK_ROWS = 96;
/// Widened weights that several tiles read in turn: so many bytes of them stay in L1.
constexpr int64_t CHUNK_BYTES = 24 << 10;

/// Bytes of what stands for one panel of outputs: a pair of panels where the layer is gated.
static inline int64_t unit_bytes(const Linear& layer) { return panel_bytes(layer) * (layer.gated ? 2 : 1); }

/// Products of rows `begin` to `end` (at most MAX_BLOCK_ROWS) with one panel: (rows, PANEL) totals.
///
/// One tile waits for memory: what it needs soon is fetched. Several fetch among them what lies `next` bytes on, which this
/// thread reads after this panel. Where they widen weights they take the columns in chunks, which are widened once for all
/// of them. Each output's sums are the same either way.
static void products(const Linear& layer, const Activations& x, Range rows, int64_t panel, int64_t next, float* totals) {
  const int64_t num_rows = rows.end - rows.begin;
  const Words words = words_of(layer), wide = widens(words, num_rows) ? widened(words) : words;
  const uint8_t* weights = layer.panels + panel * panel_bytes(layer);
  if (num_rows <= max_rows(words)) {
    const Tile tile{layer, x, rows.begin, panel, 0, layer.ins, weights, {weights + DISTANCE, 1}, totals};
    return compute_tile(words, (int)num_rows, tile);
  }
  alignas(64) uint8_t widened_chunk[CHUNK_BYTES];
  const int64_t columns = columns_a_step(layer), most = max_rows(wide), num_tiles = (num_rows + most - 1) / most;
  const int64_t chunk = words == wide ? layer.ins : CHUNK_BYTES / STEP_BYTES * columns / num_parts(words);
  for (int64_t begin = 0; begin < layer.ins; begin += chunk) {
    const int64_t end = begin + chunk < layer.ins ? begin + chunk : layer.ins;
    const uint8_t* read = weights + begin / columns * step_bytes(words);
    if (words != wide) {
      const int64_t steps = (end - begin + columns - 1) / columns;
      widen(layer, words, read, steps, steps * step_bytes(words), widened_chunk);  // and fetch the next chunk
      read = widened_chunk;
    }
    for (int64_t i = 0; i < num_tiles; i++) {
      const Range part = share(num_rows, (int)i, (int)num_tiles);  // tiles of even height: 9 rows are 5 and 4
      const int64_t fetched = words == wide ? next + panel_bytes(layer) * i / num_tiles : 0;
      const Tile tile{layer, x, rows.begin + part.begin, panel, begin, end, read, {weights + fetched, (int)num_tiles},
                      totals + part.begin * PANEL};
      compute_tile(wide, (int)(part.end - part.begin), tile);
    }
  }
}

/// Rows `begin` to `end` of one panel (of a pair of panels where the layer is gated).
static void panel_rows(const Linear& layer, const Activations& x, const Output& out, Range rows, int64_t panel,
                       int64_t next) {
  alignas(64) float totals[MAX_BLOCK_ROWS * PANEL], gates[MAX_BLOCK_ROWS * PANEL];
  if (layer.gated) products(layer, x, rows, 2 * panel, next, gates);
  products(layer, x, rows, layer.gated ? 2 * panel + 1 : panel, next, totals);
  const float* gate = layer.gated ? gates : nullptr;
  if (out.is_bf16) {
    finish<bf16_t>(layer, out, rows.begin, rows.end - rows.begin, panel, totals, gate);
  } else {
    finish<float>(layer, out, rows.begin, rows.end - rows.begin, panel, totals, gate);
  }
}

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
static void linear_part(const Linear& layer, const Activations& x, int64_t num_rows, const Output& out, int thread,
                        int num_threads, const Linear* then = nullptr) {
  each_unit(layer, x, num_rows, thread, num_threads, then, [&](Range rows, int64_t panel, int64_t next) {
    panel_rows(layer, x, out, rows, panel, next);
  });
}

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
