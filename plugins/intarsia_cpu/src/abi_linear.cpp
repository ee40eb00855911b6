// Linear layers: products, what follows them, and the C ABI. `linears.py` mirrors the structures.
#include <omp.h>

#include "linear.h"
#include "vmath.h"

namespace linear {

/// Widened weights that several tiles read in turn: so many bytes of them stay in L1.
constexpr int64_t CHUNK_BYTES = 24 << 10;

/// One tile of one pass waits for memory: what it needs soon is fetched. Several fetch among them what lies `next` bytes on,
/// which this thread reads after this panel. Where they widen weights they take the columns in chunks, which are widened
/// once for all of them. All tiles make a pass before the next, so that its weights stay in L1. Each output's sums are the
/// same in any way.
void products(const Linear& layer, const Activations& x, Range rows, int64_t panel, int64_t next, float* totals) {
  alignas(64) uint8_t widened_chunk[CHUNK_BYTES];
  const int64_t num_rows = rows.end - rows.begin;
  const Words words = words_of(layer), wide = widens(words, num_rows) ? widened(words) : words;
  const uint8_t* weights = layer.panels + panel * panel_bytes(layer);
  const int64_t columns = columns_a_step(layer), most = max_rows(wide), num_tiles = (num_rows + most - 1) / most;
  const int64_t chunk = words == wide ? layer.ins : CHUNK_BYTES / STEP_BYTES * columns / num_parts(words);
  const int passes = num_passes((num_rows + num_tiles - 1) / num_tiles), sharers = (int)num_tiles * passes;
  for (int64_t begin = 0; begin < layer.ins; begin += chunk) {
    const int64_t end = begin + chunk < layer.ins ? begin + chunk : layer.ins;
    const uint8_t* read = weights + begin / columns * step_bytes(words);
    if (words != wide) {
      const int64_t steps = (end - begin + columns - 1) / columns;
      widen(layer, words, read, steps, steps * step_bytes(words), widened_chunk);  // and fetch the next chunk
      read = widened_chunk;
    }
    for (int turn = 0; turn < sharers; turn++) {
      const int pass = turn / (int)num_tiles;
      const Range part = share(num_rows, turn % (int)num_tiles, (int)num_tiles);  // of even height: 9 rows are 5 and 4
      const int height = (int)(part.end - part.begin), first = pass * vectors_a_pass(height);
      if (first >= VECTORS) continue;  // a lower tile takes fewer passes
      const int64_t fetched = sharers == 1 ? DISTANCE : words == wide ? next + panel_bytes(layer) * turn / sharers : 0;
      const Ahead ahead{weights + fetched, sharers};
      const Tile tile{layer, x, rows.begin + part.begin, panel, begin, end, read, ahead, totals + part.begin * PANEL, first};
      compute_tile(wide, height, tile);
    }
  }
}

template void prepare_row(const Linear& layer, const Activations& to, int64_t row, const float* x);
template void prepare_row(const Linear& layer, const Activations& to, int64_t row, const bf16_t* x);

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

void linear_part(const Linear& layer, const Activations& x, int64_t num_rows, const Output& out, int thread,
                 int num_threads, const Linear* then) {
  each_unit(layer, x, num_rows, thread, num_threads, then, [&](Range rows, int64_t panel, int64_t next) {
    panel_rows(layer, x, out, rows, panel, next);
  });
}

}  // namespace linear

#define API extern "C" __attribute__((visibility("default")))

using linear::Activations;
using linear::Linear;
using linear::Numbers;
using linear::Output;

/// Bytes of scratch that `intarsia_linear` needs for so many rows; 0 where the layer reads them as they are.
API int64_t intarsia_linear_scratch(const Linear* layer, int32_t is_bf16, int64_t num_rows) {
  const Numbers type = is_bf16 ? Numbers::BF16 : Numbers::FP32;
  return linear::reads_as_is(*layer, type) ? 0 : linear::activation_bytes(*layer, num_rows);
}

/// One linear layer over rows of floats or bf16, `stride` numbers apart. Scratch is aligned to 64 bytes, or null where the
/// layer reads the rows as they are.
API void intarsia_linear(const Linear* layer, const void* x, int32_t is_bf16, int64_t stride, int64_t num_rows,
                         void* scratch, const Output* out, int32_t num_threads) {
  Activations rows;
  if (scratch != nullptr) {
    rows = linear::lay_out(*layer, scratch, num_rows);
  } else {
    rows = {(uint8_t*)x, stride * (is_bf16 ? 2 : 4), nullptr, nullptr, nullptr, linear::num_groups(*layer)};
  }
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (scratch != nullptr) {
      if (is_bf16) {
        linear::prepare_part(*layer, rows, (const bf16_t*)x, stride, num_rows, thread, threads);
      } else {
        linear::prepare_part(*layer, rows, (const float*)x, stride, num_rows, thread, threads);
      }
#pragma omp barrier
    }
    linear::linear_part(*layer, rows, num_rows, *out, thread, threads);
  }
}
