// Tiles: a few rows of activations against columns of one panel, sums of which are held in registers.
#pragma once

#include <type_traits>
#include <utility>

#include "widen.h"

namespace linear {

// As many rows as registers hold accumulators for.
#if ISA_AVX512
constexpr int MAX_ROWS = 8;
#elif ISA_AVX2 || defined(__ARM_NEON)
constexpr int MAX_ROWS = 2;
#else
constexpr int MAX_ROWS = 1;
#endif
// Of integers, sums of a group and of all groups both. Float weights that are widened need registers for that.
constexpr int MAX_GROUPED_ROWS = MAX_ROWS > 4 ? 4 : MAX_ROWS;

/// Rows of a tile, at most.
constexpr int max_rows(Words words) {
  return is_integer(words) || widened(words) != words ? MAX_GROUPED_ROWS : MAX_ROWS;
}
/// Whether more tiles than one pay for widening weights first. Where tiles are high, that of INT4 to bytes costs little.
constexpr bool widens(Words words, int64_t num_rows) {
  return words != widened(words) && num_rows > max_rows(words) && (words != Words::INT4 || MAX_ROWS < 8);
}

/// What the tiles of a panel ask for while they walk it, line after line: `sharers` of them together as much as the panel
/// holds, at an even pace, since memory waits for nobody. The hardware alone leaves a third of its bandwidth unused.
///
/// A single tile reads a line once, and leaves the caches to all else: what the engine around the kernels reads and writes
/// stays there. Several tiles find it in L2.
struct Ahead {
  const uint8_t* from;  // the next line
  int sharers;
  int due = 0;  // sharers' parts of lines that are not asked for yet
};
/// How far ahead a single tile asks, in bytes.
constexpr int64_t DISTANCE = 8 << 10;

template <int64_t BYTES>
static INLINE void fetch(Ahead& ahead) {
  constexpr int LINES = (BYTES + 63) / 64;
  if (ahead.sharers == 1) {
    UNROLL for (int line = 0; line < LINES; line++) isa::prefetch_once(ahead.from + 64 * line);
    ahead.from += BYTES;
  } else {
    for (ahead.due += LINES; ahead.due >= ahead.sharers; ahead.due -= ahead.sharers) {
      isa::prefetch(ahead.from);
      ahead.from += 64;
    }
  }
}

/// What a tile works on. Groups are whole: `begin` is the first column of one.
struct Tile {
  const Linear& layer;
  const Activations& x;
  int64_t row, panel;
  int64_t begin, end;  // columns
  const uint8_t* weights;  // the words of column `begin`
  Ahead ahead;
  float* totals;  // (rows, PANEL), which the products are added to; of column 0, which they replace

  bool is_first() const { return begin == 0; }
};

/// Sums of int8 products are whole numbers.
template <Words WORDS>
using Sum = std::conditional_t<is_integer(WORDS), I, F>;

template <Words WORDS>
static INLINE void dot_into(Sum<WORDS>& sum, I weights, I row) {
  if constexpr (is_integer(WORDS)) {
    isa::dot4_into(sum, weights, row);
  } else if constexpr (widened(WORDS) == Words::BF16) {
    isa::dot2_into(sum, weights, row);
  } else {
    isa::fma_into(sum, isa::as_float(weights), isa::as_float(row));
  }
}

/// Add the products of `steps` steps, column by column.
template <int ROWS, Words WORDS>
static INLINE void walk(Sum<WORDS> (&sums)[ROWS][VECTORS], const Table<WORDS>& table, const uint8_t* w,
                        const uint8_t* rows, int64_t row_bytes, int64_t steps, Ahead& ahead) {
  constexpr int PARTS = num_parts(WORDS);
  for (int64_t k = 0; k < steps; k++, w += step_bytes(WORDS), rows += 4 * PARTS) {
    I words[VECTORS];
    fetch<step_bytes(WORDS)>(ahead);
    if constexpr (!is_sparse(WORDS)) {
      UNROLL for (int v = 0; v < VECTORS; v++) words[v] = isa::load_int(w + 4 * v * LANES);
    }
    UNROLL for (int part = 0; part < PARTS; part++) {
      I weights[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; v++) {
        if constexpr (is_sparse(WORDS)) {
          weights[v] = sparse_part_of<WORDS>(w, v, part);
        } else {
          weights[v] = part_of<WORDS>(words[v], part, table);
        }
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        const I four = isa::broadcast4(rows + r * row_bytes + 4 * part);
        UNROLL for (int v = 0; v < VECTORS; v++) dot_into<WORDS>(sums[r][v], weights[v], four);
      }
    }
  }
}

/// One group of a tile: where its scales lie, and its numbers of rows.
struct Group {
  int64_t at;     // of the panel's scales; no matter where there is one an output
  int64_t row0;   // of (R, G) numbers, the first row's
  int64_t stride;
};

static INLINE Group group_of(const Tile& tile, int64_t group) {
  const Linear& layer = tile.layer;
  const int64_t scale = layer.groups_a_scale > 0 ? tile.panel * scales_a_row(layer) + group / layer.groups_a_scale : 0;
  return {scale * PANEL, tile.row * tile.x.num_groups + group, tile.x.num_groups};
}

static INLINE F load_zeros(const Linear& layer, int64_t at) {
  return isa::from_int(isa::load_uint8_int(layer.zeros + at));
}

/// Begin integer sums at minus what the weights' offset adds: panels hold INT8 weights + 128, and INT4 as they are.
template <int ROWS>
static INLINE void begin_integers(const Tile& tile, const Group& group, I (&sums)[ROWS][VECTORS]) {
  const Linear& layer = tile.layer;
  const int32_t middle = layer.format == Format::INT8 ? 128 : middle_of(layer);
  UNROLL for (int r = 0; r < ROWS; r++) {
    const I begin = isa::set_int(-middle * tile.x.sums[group.row0 + r * group.stride]);
    UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = begin;
  }
}

/// What a tile adds to: in registers where these are enough, else where it lies.
template <int ROWS>
class Totals {
 public:
  explicit INLINE Totals(const Tile& tile) : memory_(tile.totals) {
    if constexpr (IN_REGISTERS) {
      UNROLL for (int i = 0; i < ROWS * VECTORS; i++) {
        values_[i] = tile.is_first() ? isa::zero() : isa::load(memory_ + i * LANES);
      }
    } else if (tile.is_first()) {
      for (int i = 0; i < ROWS * VECTORS; i++) isa::store(memory_ + i * LANES, isa::zero());
    }
  }
  INLINE F get(int row, int v) const {
    return IN_REGISTERS ? values_[row * VECTORS + v] : isa::load(memory_ + row * PANEL + v * LANES);
  }
  INLINE void set(int row, int v, F value) {
    if constexpr (IN_REGISTERS) {
      values_[row * VECTORS + v] = value;
    } else {
      isa::store(memory_ + row * PANEL + v * LANES, value);
    }
  }
  INLINE void finish() const {
    if constexpr (IN_REGISTERS) {
      UNROLL for (int i = 0; i < ROWS * VECTORS; i++) isa::store(memory_ + i * LANES, values_[i]);
    }
  }

 private:
  static constexpr bool IN_REGISTERS = LANES == 16 && ROWS <= MAX_GROUPED_ROWS;
  float* memory_;
  F values_[ROWS * VECTORS];
};

/// totals += sums * activation scale (* weight scale).
template <int ROWS>
static INLINE void add_integers(const Tile& tile, const Group& group, const I (&sums)[ROWS][VECTORS],
                                Totals<ROWS>& totals) {
  const Linear& layer = tile.layer;
  const float* scales = tile.x.scales + group.row0;
  const int32_t* row_sums = tile.x.sums + group.row0;
  UNROLL for (int v = 0; v < VECTORS; v++) {
    const F scale = layer.groups_a_scale > 0 ? load_numbers(layer.scales, layer.scale_type, group.at + v * LANES) : F{};
    const F zero = layer.zeros != nullptr ? load_zeros(layer, group.at + v * LANES) : F{};
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int64_t at = r * group.stride;
      F value = isa::from_int(sums[r][v]);
      // Exact, as all three are whole numbers below 2**24.
      if (layer.zeros != nullptr) value = isa::fma(zero, isa::set(-(float)row_sums[at]), value);
      if (layer.groups_a_scale > 0) {
        totals.set(r, v, isa::fma(value * isa::set(scales[at]), scale, totals.get(r, v)));
      } else {
        totals.set(r, v, isa::fma(value, isa::set(scales[at]), totals.get(r, v)));
      }
    }
  }
}

/// totals += (sums - zero point * sum of the row's group) * weight scale.
template <int ROWS>
static INLINE void add_floats(const Tile& tile, const Group& group, const F (&sums)[ROWS][VECTORS],
                              Totals<ROWS>& totals) {
  const Linear& layer = tile.layer;
  UNROLL for (int v = 0; v < VECTORS; v++) {
    const F scale = load_numbers(layer.scales, layer.scale_type, group.at + v * LANES);
    if (layer.zeros != nullptr) {
      const float* row_sums = tile.x.float_sums + group.row0;
      const F zero = load_zeros(layer, group.at + v * LANES);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const F value = isa::fma(zero, isa::set(-row_sums[r * group.stride]), sums[r][v]);
        totals.set(r, v, isa::fma(value, scale, totals.get(r, v)));
      }
    } else {
      UNROLL for (int r = 0; r < ROWS; r++) {
        totals.set(r, v, isa::fma(sums[r][v], scale, totals.get(r, v)));
      }
    }
  }
}

/// totals += minimum * sum of the row's group.
template <int ROWS>
static INLINE void add_minima(const Tile& tile, const Group& group, Totals<ROWS>& totals) {
  const float* row_sums = tile.x.float_sums + group.row0;
  UNROLL for (int v = 0; v < VECTORS; v++) {
    const F least = load_numbers(tile.layer.mins, tile.layer.min_type, group.at + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      totals.set(r, v, isa::fma(least, isa::set(row_sums[r * group.stride]), totals.get(r, v)));
    }
  }
}

/// Add the products of some rows and columns to `totals`: group by group, each sum begun anew, exact of integers.
template <int ROWS, Words WORDS>
static __attribute__((noinline)) void grouped_tile(const Tile& tile) {
  constexpr int64_t COLUMNS = 4 * num_parts(WORDS) / (is_integer(WORDS) ? 1 : widened(WORDS) == Words::BF16 ? 2 : 4);
  const Linear& layer = tile.layer;
  const Table<WORDS> table(layer);
  const int64_t bytes = is_integer(WORDS) ? 1 : widened(WORDS) == Words::BF16 ? 2 : 4;
  const uint8_t *w = tile.weights, *rows = tile.x.data + tile.row * tile.x.row_bytes;
  Totals<ROWS> totals(tile);
  Ahead ahead = tile.ahead;
  for (int64_t column = tile.begin; column < tile.end; column += layer.group) {
    const Group group = group_of(tile, column / layer.group);
    const int64_t width = tile.end - column < layer.group ? tile.end - column : layer.group;
    const int64_t steps = (width + COLUMNS - 1) / COLUMNS;
    Sum<WORDS> sums[ROWS][VECTORS] = {};
    if constexpr (is_integer(WORDS)) begin_integers<ROWS>(tile, group, sums);
    walk<ROWS, WORDS>(sums, table, w, rows + column * bytes, tile.x.row_bytes, steps, ahead);
    if constexpr (is_integer(WORDS)) {
      add_integers<ROWS>(tile, group, sums, totals);
    } else {
      add_floats<ROWS>(tile, group, sums, totals);
    }
    if (layer.mins != nullptr) add_minima<ROWS>(tile, group, totals);
    w += steps * step_bytes(WORDS);
  }
  totals.finish();
}

/// As above without groups: one chain of sums along all columns.
template <int ROWS, Words WORDS>
static __attribute__((noinline)) void whole_tile(const Tile& tile) {
  constexpr int64_t BYTES = widened(WORDS) == Words::BF16 ? 2 : 4, COLUMNS = 4 * num_parts(WORDS) / BYTES;
  const Table<WORDS> table(tile.layer);
  F sums[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
      sums[r][v] = tile.is_first() ? isa::zero() : isa::load(tile.totals + r * PANEL + v * LANES);
    }
  }
  const uint8_t* rows = tile.x.data + tile.row * tile.x.row_bytes + tile.begin * BYTES;
  Ahead ahead = tile.ahead;
  walk<ROWS, WORDS>(sums, table, tile.weights, rows, tile.x.row_bytes, (tile.end - tile.begin + COLUMNS - 1) / COLUMNS,
                    ahead);
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) isa::store(tile.totals + r * PANEL + v * LANES, sums[r][v]);
  }
}

/// Two functions, since g++ lets the accumulators of one loop out of registers where another of the same function follows.
template <int ROWS, Words WORDS>
static void tile_of(const Tile& tile) {
  if constexpr (!is_integer(WORDS)) {
    if (tile.layer.group == 0) return whole_tile<ROWS, WORDS>(tile);
  }
  grouped_tile<ROWS, WORDS>(tile);
}

template <Words WORDS, int... COUNTS>
static INLINE void run_tile(int num_rows, const Tile& tile, std::integer_sequence<int, COUNTS...>) {
  static constexpr void (*functions[])(const Tile&) = {tile_of<COUNTS + 1, WORDS>...};
  functions[num_rows - 1](tile);
}
template <Words WORDS>
static INLINE void run_tile(int num_rows, const Tile& tile) {
  run_tile<WORDS>(num_rows, tile, std::make_integer_sequence<int, max_rows(WORDS)>{});
}

/// Products of `num_rows` rows, at most `max_rows`.
static inline void compute_tile(Words words, int num_rows, const Tile& tile) {
  switch (words) {
    case Words::INT8: return run_tile<Words::INT8>(num_rows, tile);
    case Words::INT4: return run_tile<Words::INT4>(num_rows, tile);
    case Words::BF16: return run_tile<Words::BF16>(num_rows, tile);
    case Words::FP32: return run_tile<Words::FP32>(num_rows, tile);
    case Words::INT8_AS_FP32: return run_tile<Words::INT8_AS_FP32>(num_rows, tile);
    case Words::INT4_AS_FP32: return run_tile<Words::INT4_AS_FP32>(num_rows, tile);
    case Words::SPARSE_INT8: return run_tile<Words::SPARSE_INT8>(num_rows, tile);
    case Words::SPARSE_BF16: return run_tile<Words::SPARSE_BF16>(num_rows, tile);
    case Words::SPARSE_FP32: return run_tile<Words::SPARSE_FP32>(num_rows, tile);
    default: break;
  }
  if constexpr (HAS_BF16_DOTS) {
    if (words == Words::INT8_AS_BF16) return run_tile<Words::INT8_AS_BF16>(num_rows, tile);
    if (words == Words::INT4_AS_BF16) return run_tile<Words::INT4_AS_BF16>(num_rows, tile);
  }
}

}  // namespace linear
