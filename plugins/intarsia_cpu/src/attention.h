// Attention over the pages of a cache, for rows that prefill, decode or verify alike (flash attention, Dao et al. 2022).
//
// A row is one sequence's tokens of the step. The queries of all its tokens and of the query heads that share a kv head
// are one list, token by token: query i belongs to token i / group and head i % group. Blocks of them walk the keys in
// tiles of 64, which begin at multiples of 64, in order, with an online softmax. A tile's keys and values are read from
// their pages once a block and packed as the products read them.
//
// A query's bits depend on its own numbers and its keys' alone: its products are one chain an output, in a fixed order;
// a tile that it does not see leaves its state as it was; what a block holds besides, and who computes it, adds nothing.
//
// Legend: T tokens, R rows, H heads, K kv heads, D head dim, S slots a page; a word is 4 bytes: a float, or two bf16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "entries.h"
#include "isa.h"
#include "key_tiles.h"
#include "threads.h"
#include "vmath.h"

/// One layer's attention for a step. Strides count elements.
struct AttentionArgs {
  const void* queries;           // (T, H, D), the last axis contiguous
  void* out;                     // (T, H, D), of the queries' type, the last axis contiguous
  const void* keys;              // of all pages
  const void* values;            // with the strides of the keys
  const float* key_scales;       // of int8 entries, else null
  const float* value_scales;     // with the strides of the keys' scales
  const int32_t* bounds;         // R + 1 offsets into T
  const int32_t* starts;         // R positions of the rows' first tokens
  const int32_t* pages;          // the rows' page tables, end to end
  const int32_t* page_bounds;    // R + 1 offsets into `pages`
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t page_stride, kv_head_stride, slot_stride;
  int64_t scale_page_stride, scale_head_stride, scale_slot_stride;
  int32_t num_rows, num_heads, num_kv_heads, head_dim, page_size;
  int32_t window;                // keys that a query sees, itself included; 0 is all
  int32_t queries_bf16;          // whether they are bf16; else float
  int32_t entry;                 // of `entries::Entry`
  float scale;                   // of the products
  float soft_cap;                // scores become cap * tanh(score / cap); 0 is none
};

namespace attention {

using isa::F;
using isa::LANES;
using key_tiles::Floats;
using key_tiles::Foresight;
using key_tiles::Places;
using key_tiles::MAX_DIM;
using key_tiles::TILE;

constexpr int BLOCK = 96;  // queries whose state is held at once: a multiple of ROWS
constexpr float NOTHING = -INFINITY;

// How many queries, and how many vectors of keys or dimensions, a product holds in registers.
#if ISA_AVX512
constexpr int ROWS = 6, VECTORS = 4;
#elif ISA_AVX2
constexpr int ROWS = 6, VECTORS = 2;
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif

/// Queries begin..end of one row and kv head, and where their keys lie.
struct Job {
  const AttentionArgs& args;
  int row, kv_head, begin, end;
  int group = args.num_heads / args.num_kv_heads;

  int position(int query) const { return args.starts[row] + query / group; }
  /// The first position that a query sees, and that one at a position does.
  int lowest(int query) const { return lowest_at(position(query)); }
  int lowest_at(int position) const { return args.window ? std::max(0, position - args.window + 1) : 0; }
};

/// What a block of queries carries from tile to tile.
template <class Words>
struct State {
  alignas(64) typename Words::Word queries[BLOCK * MAX_DIM / Words::NUMBERS];
  alignas(64) float mixed[BLOCK * MAX_DIM];  // weighted values, a multiple of LANES dimensions each
  int position[BLOCK];
  float peak[BLOCK];                         // the largest score, times log2(e)
  alignas(64) float total[BLOCK * LANES];    // sums of exponentials: those of each lane's keys
};

// --- scores ----------------------------------------------------------------------------------------------------------

/// scores[r][...] = queries[r] . keys, for N vectors of keys. `foresight` asks for others between the steps.
template <class Words, int R, int N>
static INLINE void score(const typename Words::Word* queries, int words, const typename Words::Word* keys, float* scores,
                         Foresight foresight) {
  F sums[R][N];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) sums[r][n] = isa::zero();
  for (int w = 0; w < words; w++) {
    typename Words::Vector key[N];
    UNROLL for (int n = 0; n < N; n++) key[n] = Words::load(keys + w * TILE + n * LANES);
    foresight.at(w);
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
                                                Foresight foresight) {
  const int end = (count + LANES - 1) / LANES;
  int n = 0;
  const auto some = [&](auto width) {
    score<Words, R, width()>(queries, words, keys + n * LANES, scores + n * LANES, foresight);
    n += width();
    foresight = {};
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
static INLINE void finish(const AttentionArgs& args, const key_tiles::Tile<Words>& packed, Seen seen, float* scores) {
  UNROLL for (int n = 0; n < TILE / LANES; n++) {
    F score = isa::load(scores + n * LANES);
    if (packed.scaled) score *= isa::load(packed.key_scales + n * LANES);
    if (args.soft_cap != 0) {
      const F cap = isa::set(args.soft_cap);
      score = vmath::tanh(score * isa::set(args.scale) / cap) * cap;
    }
    isa::store(scores + n * LANES, isa::select(seen.mask(n), score, isa::set(NOTHING)));
  }
}

/// Turn R queries' products of a tile into weights, for the numbers of the values; keys that are not seen weigh 0. `kept`
/// is what the states before are multiplied by.
template <class Words, int R>
static INLINE void weigh(const AttentionArgs& args, const key_tiles::Tile<Words>& packed, float* scores, const Seen* seen,
                         float* peaks, float* totals, typename Words::Word* weights, float* kept) {
  constexpr int N = TILE / LANES;
  constexpr float LOG2_E = 1.44269504f;  // exponentials are taken to the base 2
  const F factor = isa::set(args.soft_cap != 0 ? LOG2_E : args.scale * LOG2_E);
  F rows[GROUP];
  UNROLL for (int r = 0; r < GROUP; r++) rows[r] = isa::set(NOTHING);
  UNROLL for (int r = 0; r < R; r++) {
    if (!seen[r].whole() || packed.scaled || args.soft_cap != 0) finish(args, packed, seen[r], scores + r * TILE);
    UNROLL for (int n = 0; n < N; n++) rows[r] = isa::max(rows[r], isa::load(scores + r * TILE + n * LANES));
  }
  const F before = isa::load(peaks, R), now = isa::max(before, largest_of_each(rows) * factor);
  // Where nothing is seen yet, -inf - -inf would not be a number.
  const F least = isa::select(now == isa::set(NOTHING), isa::zero(), now);
  alignas(64) float leasts[LANES];
  isa::store(leasts, least);
  isa::store(peaks, now, R);
  isa::store(kept, vmath::exp2_below<false>(before - least));
  UNROLL for (int r = 0; r < R; r++) {
    F sum = isa::load(totals + r * LANES) * isa::set(kept[r]);
    UNROLL for (int n = 0; n < N; n++) {
      const F score = isa::fma(isa::load(scores + r * TILE + n * LANES), factor, isa::set(-leasts[r]));
      F weight = vmath::exp2_below<Words::NUMBERS == 2>(score);
      sum += weight;
      if (packed.scaled) {  // 0 times NaN would show what is not seen
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
                       const typename Words::Word* values, int width, float* mixed, Foresight foresight) {
  F sums[R][N];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) {
    sums[r][n] = isa::load(mixed + r * width + n * LANES) * isa::set(kept[r]);
  }
  for (int s = 0; s < steps; s++) {
    typename Words::Vector value[N];
    UNROLL for (int n = 0; n < N; n++) value[n] = Words::load(values + s * width + n * LANES);
    foresight.at(s);
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
                                              Foresight foresight) {
  int d = 0;
  const auto some = [&](auto vectors) {
    mix<Words, R, vectors()>(weights, kept, steps, values + d, width, mixed + d, foresight);
    d += vectors() * LANES;
    foresight = {};
  };
  while (width - d >= VECTORS * LANES) some(std::integral_constant<int, VECTORS>());
  while (VECTORS > 2 && width - d >= 2 * LANES) some(std::integral_constant<int, 2>());
  if (d < width) some(std::integral_constant<int, 1>());
}

// --- blocks ----------------------------------------------------------------------------------------------------------

/// Let R queries, `query` the first, take in one tile, of whose keys those before `last` are packed; `soon`, if any, is
/// the tile that comes next.
template <class Words, int R>
static void take(const Job& job, int query, int tile, int last, const key_tiles::Tile<Words>& packed,
                 State<Words>& state, const Places* soon) {
  const int words = key_tiles::words<Words>(job.args.head_dim), width = key_tiles::padded(job.args.head_dim);
  const int i = query - job.begin;
  alignas(64) float scores[R * TILE];
  alignas(64) typename Words::Word weights[R * TILE / Words::NUMBERS];
  alignas(64) float kept[LANES];
  Seen seen[R];
  scores_of<Words, R>(state.queries + i * words, words, packed.keys, last, scores,
                      Foresight::of(soon, soon ? soon->keys : nullptr, words));
  for (int r = 0; r < R; r++) {
    // Vectors of keys behind the last were not multiplied; what stands there is hidden.
    for (int k = (last + LANES - 1) / LANES * LANES; k < TILE; k += LANES) isa::store(scores + r * TILE + k, isa::zero());
    const int position = state.position[i + r];
    seen[r] = {job.lowest_at(position) - tile, std::min(TILE, position + 1 - tile)};
  }
  weigh<Words, R>(job.args, packed, scores, seen, state.peak + i, state.total + i * LANES, weights, kept);
  const int steps = (last + Words::NUMBERS - 1) / Words::NUMBERS;
  mix_all<Words, R>(weights, kept, steps, packed.values, width, state.mixed + i * width,
                    Foresight::of(soon, soon ? soon->values : nullptr, steps));
}

template <class Words>
static void take_some(int count, const Job& job, int query, int tile, int last, const key_tiles::Tile<Words>& packed,
                      State<Words>& state, const Places* soon) {
  switch (count) {
    case 1: return take<Words, 1>(job, query, tile, last, packed, state, soon);
    case 2: return take<Words, 2>(job, query, tile, last, packed, state, soon);
    case 3: return take<Words, 3>(job, query, tile, last, packed, state, soon);
    case 4: return take<Words, 4>(job, query, tile, last, packed, state, soon);
    case 5: return take<Words, (ROWS > 4 ? 5 : 1)>(job, query, tile, last, packed, state, soon);
    default: return take<Words, (ROWS > 4 ? 6 : 1)>(job, query, tile, last, packed, state, soon);
  }
}

template <class Words, class Number>
static void enter(const Job& job, State<Words>& state) {
  const AttentionArgs& args = job.args;
  const int words = key_tiles::words<Words>(args.head_dim), width = key_tiles::padded(args.head_dim), group = job.group;
  for (int query = job.begin; query < job.end; query++) {
    const int i = query - job.begin;
    const int64_t token = args.bounds[job.row] + query / group, head = job.kv_head * group + query % group;
    const Number* source = (const Number*)args.queries + token * args.query_token_stride + head * args.query_head_stride;
    Words::copy(state.queries + i * words, source, args.head_dim);
    std::fill_n(state.mixed + i * width, width, 0.0f);
    state.position[i] = job.position(query);
    state.peak[i] = NOTHING;
    isa::store(state.total + i * LANES, isa::zero());
  }
}

template <class Words, class Number>
static void leave(const Job& job, const State<Words>& state) {
  const AttentionArgs& args = job.args;
  const int width = key_tiles::padded(args.head_dim), group = job.group;
  for (int query = job.begin; query < job.end; query++) {
    const int i = query - job.begin;
    const int64_t token = args.bounds[job.row] + query / group, head = job.kv_head * group + query % group;
    Number* target = (Number*)args.out + token * args.out_token_stride + head * args.out_head_stride;
    const F share = isa::set(1.0f / isa::sum(isa::load(state.total + i * LANES)));
    for (int d = 0; d < args.head_dim; d += LANES) {
      const F value = isa::load(state.mixed + i * width + d) * share;
      isa::store(target + d, value, std::min(LANES, args.head_dim - d));
    }
  }
}

template <class Entry>
static key_tiles::Pages<Entry> pages_of(const Job& job) {
  const AttentionArgs& args = job.args;
  const int64_t head = job.kv_head * args.kv_head_stride, scales = job.kv_head * args.scale_head_stride;
  return {(const Entry*)args.keys + head,
          (const Entry*)args.values + head,
          args.key_scales + scales,
          args.value_scales + scales,
          args.pages + args.page_bounds[job.row],
          args.page_stride,
          args.slot_stride,
          args.scale_page_stride,
          args.scale_slot_stride,
          args.page_size,
          args.head_dim,
          job.lowest(job.begin),
          job.position(job.end - 1) + 1};
}

/// Compute up to BLOCK queries. `next`, if any, is the job that follows.
template <class Words, class Query, class Entry>
static void run(const Job& job, const Job* next) {
  State<Words> state;
  key_tiles::Tile<Words> packed;
  Places places[2];  // of this tile and the next, by turns
  enter<Words, Query>(job, state);
  const key_tiles::Pages<Entry> pages = pages_of<Entry>(job);
  packed.scaled = pages.SCALED;
  pages.locate(pages.first_tile(), places[0]);
  for (int tile = pages.first_tile(), turn = 0; tile < pages.end; tile += TILE, turn ^= 1) {
    const int last = places[turn].last;
    const Places* soon = &places[turn ^ 1];
    if (tile + TILE < pages.end) {
      pages.locate(tile + TILE, places[turn ^ 1]);
    } else if (next != nullptr) {
      const key_tiles::Pages<Entry> others = pages_of<Entry>(*next);
      others.locate(others.first_tile(), places[turn ^ 1]);
    } else {
      soon = nullptr;
    }
    key_tiles::pack<Words, Entry>(packed, places[turn], job.args.head_dim);
    if constexpr (key_tiles::Pages<Entry>::SCALED) pages.read_scales(tile, places[turn], packed);
    for (int query = job.begin; query < job.end; query += ROWS) {
      const int count = std::min(ROWS, job.end - query);
      const int* positions = state.position + query - job.begin;
      const bool before = positions[count - 1] < tile, behind = job.lowest_at(positions[0]) >= tile + TILE;
      if (before || behind) continue;
      take_some<Words>(count, job, query, tile, last, packed, state, soon);
      soon = nullptr;
    }
  }
  leave<Words, Query>(job, state);
}

static void run_any(const Job& job, const Job* next) {
  const bool halves = job.args.queries_bf16;
  switch (job.args.entry) {
    case entries::INT8: return halves ? run<key_tiles::Halves, bf16_t, int8_t>(job, next) : run<Floats, float, int8_t>(job, next);
    case entries::BF16: return halves ? run<key_tiles::Halves, bf16_t, bf16_t>(job, next) : run<Floats, float, bf16_t>(job, next);
    default: return halves ? run<Floats, bf16_t, float>(job, next) : run<Floats, float, float>(job, next);
  }
}

// --- shares of the work ----------------------------------------------------------------------------------------------

/// What packing a tile costs, in queries that take it in.
constexpr int64_t PACKING = 4;

/// Tiles that queries begin..end of a row take in, packing included.
static int64_t cost(const Job& job) {
  const int first = job.lowest(job.begin) / TILE, end = job.position(job.end - 1) / TILE + 1;
  return (end - first) * (PACKING + job.end - job.begin);
}

/// The part of `count` queries whose cost begins at `at` that lies before `limit`.
static int cut(int64_t limit, int64_t at, int64_t cost, int count) {
  return (int)std::clamp<int64_t>((limit - at) * count / cost, 0, count);
}

}  // namespace attention

/// This thread's share: queries in the order of (row, kv head, token), cut into even costs.
static void attention_part(const AttentionArgs& args, int thread, int num_threads) {
  using namespace attention;
  const int group = args.num_heads / args.num_kv_heads;
  const auto queries = [&](int row) { return (args.bounds[row + 1] - args.bounds[row]) * group; };
  const auto block = [&](int row, int kv_head, int begin) {
    return Job{args, row, kv_head, begin, std::min(begin + BLOCK, queries(row))};
  };
  const auto row_cost = [&](int row) {
    int64_t sum = 0;
    for (int begin = 0; begin < queries(row); begin += BLOCK) sum += cost(block(row, 0, begin));
    return sum;
  };
  int64_t total = 0;
  for (int row = 0; row < args.num_rows; row++) total += row_cost(row) * args.num_kv_heads;
  const Range mine = share(total, thread, num_threads);
  int64_t at = 0;
  std::optional<Job> waiting;  // runs when the one behind it is known
  for (int row = 0; row < args.num_rows && at < mine.end; row++) {
    const int64_t whole = row_cost(row);
    for (int kv_head = 0; kv_head < args.num_kv_heads && at < mine.end; kv_head++) {
      if (at + whole <= mine.begin) {
        at += whole;
        continue;
      }
      for (int begin = 0; begin < queries(row) && at < mine.end; begin += BLOCK) {
        Job job = block(row, kv_head, begin);
        const int64_t price = cost(job);
        const int count = job.end - job.begin;
        const int from = cut(mine.begin, at, price, count), to = cut(mine.end, at, price, count);
        at += price;
        if (from >= to) continue;
        job.begin = begin + from;
        job.end = begin + to;
        if (waiting) run_any(*waiting, &job);
        waiting.emplace(job);
      }
    }
  }
  if (waiting) run_any(*waiting, nullptr);
}
