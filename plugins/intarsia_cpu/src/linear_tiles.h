// Tiles: a few rows of activations against columns of one panel, sums of which are held in registers.
#pragma once

#include <type_traits>
#include <utility>

#include "widen.h"

namespace linear {

// As many rows as registers hold accumulators for. On AVX-512 those of integers hold sums of a group and of all groups
// both; and float weights that are widened on the way need registers, too.
#if ISA_AVX512
constexpr int MAX_ROWS = 8, MAX_INTEGER_ROWS = 4, MAX_WIDENED_ROWS = 4;
#elif ISA_AVX2
constexpr int MAX_ROWS = 6, MAX_INTEGER_ROWS = 6, MAX_WIDENED_ROWS = 2;
#elif defined(__ARM_NEON)
constexpr int MAX_ROWS = 2, MAX_INTEGER_ROWS = 2, MAX_WIDENED_ROWS = 2;
#else
constexpr int MAX_ROWS = 1, MAX_INTEGER_ROWS = 1, MAX_WIDENED_ROWS = 1;
#endif
/// Vectors of a panel that a tile of so many rows holds sums of: on AVX2, with 16 registers, high tiles take a panel in two
/// or three passes. One line of weights then serves many rows, and comes fast enough from L2.
constexpr int vectors_a_pass(int rows) {
#if ISA_AVX2
  return rows <= 2 ? VECTORS : rows <= 4 ? VECTORS / 2 : VECTORS / 3;
#else
  return rows > 0 ? VECTORS : 0;
#endif
}
constexpr int num_passes(int64_t rows) {
  return VECTORS / vectors_a_pass((int)rows);
}

/// Rows of a tile, at most.
constexpr int max_rows(Words words) {
  return is_integer(words) ? MAX_INTEGER_ROWS : widened(words) != words ? MAX_WIDENED_ROWS : MAX_ROWS;
}
/// Whether so many rows pay for widening weights first. Where tiles are high, that of INT4 to bytes costs little; that of
/// bf16 to floats does anyway.
constexpr bool widens(Words words, int64_t num_rows) {
  if (words == Words::INT4 && MAX_ROWS >= 8) return false;
  return words != widened(words) && num_rows > max_rows(words) * (words == Words::BF16_AS_FP32 ? 4 : 1);
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
  int first;  // vector of the panel, in this pass

  bool is_first() const { return begin == 0; }
  /// The first vector of a pass of V vectors.
  template <int V>
  INLINE int first_of() const {
    return V == VECTORS ? 0 : first;
  }
};

/// Sums of int8 products are whole numbers.
template <Words WORDS>
using Sum = std::conditional_t<is_integer(WORDS), I, F>;

template <Words WORDS>
static INLINE void dot_into(Sum<WORDS>& sum, I weights, I row) {
  if constexpr (widened(WORDS) == Words::NIBBLES) {
    isa::dot4_nibbles_into(sum, weights, row);
#if ISA_INT16_DOTS
  } else if constexpr (widened(WORDS) == Words::INT16) {
    isa::dot_pairs_into(sum, weights, row);
#endif
  } else if constexpr (is_integer(WORDS)) {
    isa::dot4_into(sum, weights, row);
  } else if constexpr (widened(WORDS) == Words::BF16) {
    isa::dot2_into(sum, weights, row);
  } else {
    isa::fma_into(sum, isa::as_float(weights), isa::as_float(row));
  }
}

/// Add the products of one part of a step's words. Of weights and rows' words the fewer are held in registers, which are
/// full of sums.
template <int ROWS, int V, class Row, class Weights, class Add>
static INLINE void add_part(Row&& row, Weights&& weights, Add&& add) {
  if constexpr (V > ROWS && LANES < 16) {
    I held[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) held[r] = row(r);
    UNROLL for (int v = 0; v < V; v++) {
      const I some = weights(v);
      UNROLL for (int r = 0; r < ROWS; r++) add(r, v, some, held[r]);
    }
  } else {
    I held[V];
    UNROLL for (int v = 0; v < V; v++) held[v] = weights(v);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const I four = row(r);
      UNROLL for (int v = 0; v < V; v++) add(r, v, held[v], four);
    }
  }
}

/// Add the products of `steps` steps with V vectors from `first` on, column by column.
template <Words WORDS, int ROWS, int V>
static INLINE void walk(Sum<WORDS> (&sums)[ROWS][V], const Table<WORDS>& table, const uint8_t* w, int first,
                        const uint8_t* rows, int64_t row_bytes, int64_t steps, Ahead& ahead) {
  constexpr int PARTS = num_parts(WORDS);
  for (int64_t k = 0; k < steps; k++, w += step_bytes(WORDS), rows += 4 * PARTS) {
    fetch<step_bytes(WORDS)>(ahead);
    UNROLL for (int part = 0; part < PARTS; part++) {
      if (LANES < 16) isa::read_again();  // words, which g++ would keep from part to part, and spill sums for it
      const auto row = [&](int r) INLINED { return isa::broadcast4(rows + r * row_bytes + 4 * part); };
      const auto weights = [&](int v) INLINED {
        if constexpr (is_sparse(WORDS)) {
          return sparse_part_of<WORDS>(w, first + v, part);
        } else {
          return part_of<WORDS>(isa::load_int(w + 4 * (first + v) * LANES), part, table);
        }
      };
      add_part<ROWS, V>(row, weights, [&](int r, int v, I some, I four) INLINED { dot_into<WORDS>(sums[r][v], some, four); });
    }
  }
}

/// One group of a tile: where its scales lie, and its numbers of rows.
struct Group {
  int64_t at;     // of the pass's scales; no matter where there is one an output
  int64_t row0;   // of (R, G) numbers, the first row's
  int64_t stride;
};

template <int V>
static INLINE Group group_of(const Tile& tile, int64_t group) {
  const Linear& layer = tile.layer;
  const int64_t scale = layer.groups_a_scale > 0 ? tile.panel * scales_a_row(layer) + group / layer.groups_a_scale : 0;
  return {scale * PANEL + tile.first_of<V>() * LANES, tile.row * tile.x.num_groups + group, tile.x.num_groups};
}

static INLINE F load_zeros(const Linear& layer, int64_t at) {
  return isa::from_int(isa::load_uint8_int(layer.zeros + at));
}

/// Begin integer sums at minus what the weights' offset adds: panels hold INT8 weights + 128, and INT4 as they are.
template <int ROWS, int V>
static INLINE void begin_integers(const Tile& tile, const Group& group, I (&sums)[ROWS][V]) {
  const Linear& layer = tile.layer;
  const int32_t middle = layer.format == Format::INT8 ? 128 : middle_of(layer);
  UNROLL for (int r = 0; r < ROWS; r++) {
    const I begin = isa::set_int(-middle * tile.x.sums[group.row0 + r * group.stride]);
    UNROLL for (int v = 0; v < V; v++) sums[r][v] = begin;
  }
}

/// What a tile adds to: in registers where these are enough, else where it lies.
template <int ROWS, int V>
class Totals {
 public:
  explicit INLINE Totals(const Tile& tile) : memory_(tile.totals + tile.first_of<V>() * LANES) {
    if constexpr (IN_REGISTERS) {
      UNROLL for (int i = 0; i < ROWS * V; i++) {
        values_[i] = tile.is_first() ? isa::zero() : isa::load(memory_ + i * LANES);
      }
    } else if (tile.is_first()) {
      for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < V; v++) set(r, v, isa::zero());
      }
    }
  }
  INLINE F get(int row, int v) const {
    return IN_REGISTERS ? values_[row * V + v] : isa::load(memory_ + row * PANEL + v * LANES);
  }
  INLINE void set(int row, int v, F value) {
    if constexpr (IN_REGISTERS) {
      values_[row * V + v] = value;
    } else {
      isa::store(memory_ + row * PANEL + v * LANES, value);
    }
  }
  INLINE void finish() const {
    if constexpr (IN_REGISTERS) {
      UNROLL for (int i = 0; i < ROWS * V; i++) isa::store(memory_ + i * LANES, values_[i]);
    }
  }

 private:
  static constexpr bool IN_REGISTERS = LANES == 16 && ROWS <= MAX_INTEGER_ROWS && V == VECTORS;
  float* memory_;
  F values_[ROWS * V];
};

/// totals += sums * activation scale (* weight scale).
template <int ROWS, int V>
static INLINE void add_integers(const Tile& tile, const Group& group, const I (&sums)[ROWS][V],
                                Totals<ROWS, V>& totals) {
  const Linear& layer = tile.layer;
  const float* scales = tile.x.scales + group.row0;
  const int32_t* row_sums = tile.x.sums + group.row0;
  if (layer.groups_a_scale == 0) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      const F scale = isa::set(scales[r * group.stride]);
      UNROLL for (int v = 0; v < V; v++) totals.set(r, v, isa::fma(isa::from_int(sums[r][v]), scale, totals.get(r, v)));
    }
    return;
  }
  UNROLL for (int v = 0; v < V; v++) {
    const F scale = load_numbers(layer.scales, layer.scale_type, group.at + v * LANES);
    const F zero = layer.zeros != nullptr ? load_zeros(layer, group.at + v * LANES) : F{};
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int64_t at = r * group.stride;
      F value = isa::from_int(sums[r][v]);
      // Exact, as all three are whole numbers below 2**24.
      if (layer.zeros != nullptr) value = isa::fma(zero, isa::set(-(float)row_sums[at]), value);
      totals.set(r, v, isa::fma(value * isa::set(scales[at]), scale, totals.get(r, v)));
    }
  }
}

/// totals += (sums - zero point * sum of the row's group) * weight scale.
template <int ROWS, int V>
static INLINE void add_floats(const Tile& tile, const Group& group, const F (&sums)[ROWS][V],
                              Totals<ROWS, V>& totals) {
  const Linear& layer = tile.layer;
  UNROLL for (int v = 0; v < V; v++) {
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
template <int ROWS, int V>
static INLINE void add_minima(const Tile& tile, const Group& group, Totals<ROWS, V>& totals) {
  const float* row_sums = tile.x.float_sums + group.row0;
  UNROLL for (int v = 0; v < V; v++) {
    const F least = load_numbers(tile.layer.mins, tile.layer.min_type, group.at + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      totals.set(r, v, isa::fma(least, isa::set(row_sums[r * group.stride]), totals.get(r, v)));
    }
  }
}

/// Add the products of some rows and columns to `totals`: group by group, each sum begun anew, exact of integers.
template <int ROWS, int V, Words WORDS>
static __attribute__((noinline)) void grouped_tile(const Tile& tile) {
  constexpr int64_t COLUMNS = num_columns(WORDS);
  const Linear& layer = tile.layer;
  const Table<WORDS> table(layer);
  const uint8_t *w = tile.weights, *rows = tile.x.data + tile.row * tile.x.row_bytes;
  Totals<ROWS, V> totals(tile);
  Ahead ahead = tile.ahead;
  for (int64_t column = tile.begin; column < tile.end; column += layer.group) {
    const Group group = group_of<V>(tile, column / layer.group);
    const int64_t width = tile.end - column < layer.group ? tile.end - column : layer.group;
    const int64_t steps = (width + COLUMNS - 1) / COLUMNS;
    Sum<WORDS> sums[ROWS][V] = {};
    if constexpr (is_integer(WORDS)) begin_integers<ROWS, V>(tile, group, sums);
    walk<WORDS>(sums, table, w, tile.first_of<V>(), rows + column * number_bytes(WORDS), tile.x.row_bytes, steps, ahead);
    if constexpr (is_integer(WORDS)) {
      add_integers<ROWS, V>(tile, group, sums, totals);
    } else {
      add_floats<ROWS, V>(tile, group, sums, totals);
    }
    if (layer.mins != nullptr) add_minima<ROWS, V>(tile, group, totals);
    w += steps * step_bytes(WORDS);
  }
  totals.finish();
}

/// As above without groups: one chain of sums along all columns.
template <int ROWS, int V, Words WORDS>
static __attribute__((noinline)) void whole_tile(const Tile& tile) {
  constexpr int64_t COLUMNS = num_columns(WORDS);
  const Table<WORDS> table(tile.layer);
  F sums[ROWS][V];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < V; v++) {
      sums[r][v] = tile.is_first() ? isa::zero() : isa::load(tile.totals + r * PANEL + (tile.first_of<V>() + v) * LANES);
    }
  }
  const uint8_t* rows = tile.x.data + tile.row * tile.x.row_bytes + tile.begin * number_bytes(WORDS);
  const int64_t steps = (tile.end - tile.begin + COLUMNS - 1) / COLUMNS;
  Ahead ahead = tile.ahead;
  walk<WORDS>(sums, table, tile.weights, tile.first_of<V>(), rows, tile.x.row_bytes, steps, ahead);
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int v = 0; v < V; v++) isa::store(tile.totals + r * PANEL + (tile.first_of<V>() + v) * LANES, sums[r][v]);
  }
}

/// Two functions, since g++ lets the accumulators of one loop out of registers where another of the same function follows.
template <int ROWS, Words WORDS>
static void tile_of(const Tile& tile) {
  constexpr int V = vectors_a_pass(ROWS);
  if constexpr (!is_integer(WORDS)) {
    if (tile.layer.group == 0) return whole_tile<ROWS, V, WORDS>(tile);
  }
  grouped_tile<ROWS, V, WORDS>(tile);
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

/// Products of `num_rows` rows, at most `max_rows`, with the vectors of a pass. Tiles are most of what there is to compile:
/// each kind has a source of its own, `integer_tiles.cpp` and `float_tiles.cpp`.
void integer_tile(Words words, int num_rows, const Tile& tile);
void float_tile(Words words, int num_rows, const Tile& tile);

static inline void compute_tile(Words words, int num_rows, const Tile& tile) {
  return is_integer(words) ? integer_tile(words, num_rows, tile) : float_tile(words, num_rows, tile);
}

}  // namespace linear
