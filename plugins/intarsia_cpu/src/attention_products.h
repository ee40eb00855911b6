// What some queries do with a tile of keys: scores, softmax, weighted values, each in registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "isa.h"
#include "key_tiles.h"
#include "vmath.h"

namespace attention {

using isa::F;
using isa::LANES;
using key_tiles::Foresight;
using key_tiles::TILE;

// How many queries, and how many vectors of keys or dimensions, a product holds in registers.
#if ISA_AVX512
constexpr int ROWS = 6, VECTORS = 4;
#elif ISA_AVX2
constexpr int ROWS = 6, VECTORS = 2;
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif

constexpr float NOTHING = -INFINITY;

/// What scores are made of besides products.
struct Scoring {
  float scale;     // of the products
  float soft_cap;  // scores become cap * tanh(score / cap); 0 is none
};

// --- scores ----------------------------------------------------------------------------------------------------------

/// scores[r][...] = queries[r] . keys, for N vectors of keys. `foresight` asks for others between the steps.
template <class Words, int R, int N>
static INLINE void score(const typename Words::Word* queries, int words, const typename Words::Word* keys, float* scores,
                         Foresight* foresight) {
  F sums[R][N];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sums[r][n] = isa::zero();
  for (int w = 0; w < words; w++) {
    typename Words::Vector key[N];
    UNROLL for (int n = 0; n < N; n++) key[n] = Words::load(keys + w * TILE + n * LANES);
    if (foresight) foresight->ask(2);
    UNROLL for (int r = 0; r < R; r++) {
      const typename Words::Vector query = Words::broadcast(queries + r * words + w);
      UNROLL for (int n = 0; n < N; n++) Words::multiply_add(sums[r][n], key[n], query);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) isa::store(scores + r * TILE + n * LANES, sums[r][n]);
}

/// The scores of the first `count` keys of a tile, rounded up to vectors.
template <class Words, int R>
static __attribute__((noinline)) void scores_of(const typename Words::Word* queries, int words,
                                                const typename Words::Word* keys, int count, float* scores,
                                                Foresight* foresight) {
  const int end = (count + LANES - 1) / LANES;
  int n = 0;
  const auto some = [&](auto width) {
    score<Words, R, width()>(queries, words, keys + n * LANES, scores + n * LANES, foresight);
    n += width();
  };
  while (end - n >= VECTORS) some(std::integral_constant<int, VECTORS>());
  while (VECTORS > 2 && end - n >= 2) some(std::integral_constant<int, 2>());
  if (n < end) some(std::integral_constant<int, 1>());
}

// --- softmax ---------------------------------------------------------------------------------------------------------

constexpr int GROUP = 8 > LANES ? LANES : 8;  // queries whose maxima lie in one vector
static_assert(ROWS <= GROUP);

/// The largest number of each of GROUP vectors, side by side in the first lanes: rows and lanes change places step by
/// step, and at each step two vectors become one.
template <int STEP>
static INLINE void merge(F* rows) {
  UNROLL for (int row = 0; row < GROUP; row += 2 * STEP) {
    key_tiles::swap_blocks<STEP>(rows[row], rows[row + STEP], std::make_integer_sequence<int, LANES>());
    rows[row] = isa::max(rows[row], rows[row + STEP]);
  }
}
static INLINE F largest_of_each(F* rows) {
  merge<1>(rows);
  merge<2>(rows);
  if constexpr (GROUP > 4) merge<4>(rows);
  if constexpr (LANES > GROUP) {
    F upper = rows[0];
    key_tiles::swap_blocks<GROUP>(rows[0], upper, std::make_integer_sequence<int, LANES>());
    return isa::max(rows[0], upper);
  }
  return rows[0];
}

/// Which keys of a tile a query sees: first..last.
struct Seen {
  int first, last;

  bool whole() const { return first <= 0 && last >= TILE; }
  INLINE isa::I mask(int n) const { return isa::first(last - n * LANES) & ~isa::first(first - n * LANES); }
};

/// Make of one query's products its scores, but for a factor: those of keys that it does not see are -infinity. Products
/// of int8 keys are of the numbers alone.
template <class Words>
static __attribute__((noinline)) void finish(const Scoring& scoring, const key_tiles::Tile<Words>& packed, Seen seen, float* scores) {
  for (int n = 0; n < TILE / LANES; n++) {
    F score = isa::load(scores + n * LANES);
    if (packed.scaled) score *= isa::load(packed.key_scales + n * LANES);
    if (scoring.soft_cap != 0) {
      const F cap = isa::set(scoring.soft_cap);
      score = vmath::tanh(score * isa::set(scoring.scale) / cap) * cap;
    }
    isa::store(scores + n * LANES, isa::select(seen.mask(n), score, isa::set(NOTHING)));
  }
}

/// Turn R queries' products of a tile into weights, for the numbers of the values; keys that are not seen weigh 0. `kept`
/// is what the states before are multiplied by.
template <class Words, int R, bool SCALED>
static INLINE void weigh(const Scoring& scoring, const key_tiles::Tile<Words>& packed, float* scores, const Seen* seen,
                         float* peaks, float* totals, typename Words::Word* weights, float* kept) {
  constexpr int N = TILE / LANES;
  constexpr float LOG2_E = 1.44269504f;  // exponentials are taken to the base 2
  const F factor = isa::set(scoring.soft_cap != 0 ? LOG2_E : scoring.scale * LOG2_E);
  F rows[GROUP];
  UNROLL for (int r = 0; r < GROUP; r++) rows[r] = isa::set(NOTHING);
  UNROLL for (int r = 0; r < R; r++) {
    if (SCALED || !seen[r].whole() || scoring.soft_cap != 0) finish(scoring, packed, seen[r], scores + r * TILE);
    UNROLL for (int n = 0; n < N; n++) rows[r] = isa::max(rows[r], isa::load(scores + r * TILE + n * LANES));
  }
  const F before = isa::load(peaks, R), now = isa::max(before, largest_of_each(rows) * factor);
  // Where nothing is seen yet, -inf - -inf would not be a number.
  const F least = isa::select(now == isa::set(NOTHING), isa::zero(), now);
  alignas(64) float leasts[LANES];
  isa::store(leasts, least);
  // Where no maximum has grown, as is common, every power is 1.
  if (isa::same(before, now, R)) {
    isa::store(kept, isa::set(1.0f));
  } else {
    isa::store(peaks, now, R);
    isa::store(kept, vmath::exp2_below<false>(before - least));
  }
  for (int r = 0; r < R; r++) {
    F sum = isa::load(totals + r * LANES) * isa::set(kept[r]);
    const F lower = isa::set(-leasts[r]);
    UNROLL for (int n = 0; n < N; n++) {
      const F score = isa::fma(isa::load(scores + r * TILE + n * LANES), factor, lower);
      F weight = vmath::exp2_below<Words::NUMBERS == 2>(score);
      sum += weight;
      if constexpr (SCALED) {  // 0 times NaN would show what is not seen
        weight *= isa::select(seen[r].mask(n), isa::load(packed.value_scales + n * LANES), isa::zero());
      }
      Words::store_weights(weights + (r * TILE + n * LANES) / Words::NUMBERS, weight);
    }
    isa::store(totals + r * LANES, sum);
  }
}

// --- values ----------------------------------------------------------------------------------------------------------

/// mixed[r][...] = mixed[r][...] * kept[r] + weights[r] . values, for N vectors of dimensions and `steps` words of keys.
template <class Words, int R, int N>
static INLINE void mix(const typename Words::Word* weights, const float* kept, int steps,
                       const typename Words::Word* values, int width, float* mixed, Foresight* foresight) {
  F sums[R][N];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) {
    sums[r][n] = isa::load(mixed + r * width + n * LANES) * isa::set(kept[r]);
  }
  for (int s = 0; s < steps; s++) {
    typename Words::Vector value[N];
    UNROLL for (int n = 0; n < N; n++) value[n] = Words::load(values + s * width + n * LANES);
    if (foresight) foresight->ask(2);
    UNROLL for (int r = 0; r < R; r++) {
      const typename Words::Vector weight = Words::broadcast(weights + r * (TILE / Words::NUMBERS) + s);
      UNROLL for (int n = 0; n < N; n++) Words::multiply_add(sums[r][n], value[n], weight);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) isa::store(mixed + r * width + n * LANES, sums[r][n]);
}

template <class Words, int R>
static __attribute__((noinline)) void mix_all(const typename Words::Word* weights, const float* kept, int steps,
                                              const typename Words::Word* values, int width, float* mixed,
                                              Foresight* foresight) {
  int d = 0;
  const auto some = [&](auto vectors) {
    mix<Words, R, vectors()>(weights, kept, steps, values + d, width, mixed + d, foresight);
    d += vectors() * LANES;
  };
  while (width - d >= VECTORS * LANES) some(std::integral_constant<int, VECTORS>());
  while (VECTORS > 2 && width - d >= 2 * LANES) some(std::integral_constant<int, 2>());
  if (d < width) some(std::integral_constant<int, 1>());
}

}  // namespace attention
