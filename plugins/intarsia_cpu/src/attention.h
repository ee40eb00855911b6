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

  int group() const { return args.num_heads / args.num_kv_heads; }
  int position(int query) const { return args.starts[row] + query / group(); }
  /// The first position that a query sees.
  int lowest(int query) const { return args.window ? std::max(0, position(query) - args.window + 1) : 0; }
};

/// What a block of queries carries from tile to tile.
template <class Words>
struct State {
  alignas(64) typename Words::Word queries[BLOCK * MAX_DIM / Words::NUMBERS];
  alignas(64) float mixed[BLOCK * MAX_DIM];  // weighted values, a multiple of LANES dimensions each
  float peak[BLOCK], total[BLOCK];           // the largest score, and the sum of exponentials
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

/// Turn one query's scores of a tile into weights, of the keys first..last; the others weigh 0. Returns what the state
/// before is multiplied by. Scores of int8 keys are of the numbers alone, and weights are for the numbers of the values.
template <class Words>
static INLINE float weigh(const AttentionArgs& args, const key_tiles::Tile<Words>& packed, const float* scores, int first,
                          int last, float& peak, float& total, typename Words::Word* weights) {
  constexpr int N = TILE / LANES;
  F score[N], share[N] = {};
  F largest = isa::set(NOTHING);
  UNROLL for (int n = 0; n < N; n++) {
    score[n] = isa::load(scores + n * LANES) * isa::set(args.scale);
    if (packed.scaled) {
      score[n] *= isa::load(packed.key_scales + n * LANES);
      share[n] = isa::load(packed.value_scales + n * LANES);
    }
    if (args.soft_cap != 0) score[n] = vmath::tanh(score[n] / isa::set(args.soft_cap)) * isa::set(args.soft_cap);
  }
  if (first > 0 || last < TILE) {
    UNROLL for (int n = 0; n < N; n++) {
      const isa::I seen = isa::first(last - n * LANES) & ~isa::first(first - n * LANES);
      score[n] = isa::select(seen, score[n], isa::set(NOTHING));
      share[n] = isa::select(seen, share[n], isa::zero());  // 0 times NaN would show what is not seen
    }
  }
  UNROLL for (int n = 0; n < N; n++) largest = isa::max(largest, score[n]);
  const float now = std::max(peak, isa::largest(largest));
  // Where nothing is seen yet, -inf - -inf would not be a number.
  const F least = isa::set(now == NOTHING ? 0.0f : now);
  F sum = isa::zero();
  UNROLL for (int n = 0; n < N; n++) {
    const F weight = vmath::exp(score[n] - least);
    Words::store_weights(weights + n * LANES / Words::NUMBERS, packed.scaled ? weight * share[n] : weight);
    sum += weight;
  }
  // The exponential of 0 is exactly 1: this saves time and changes no bit.
  const float kept = now == peak ? 1.0f : vmath::exp(isa::set(peak) - least)[0];
  total = total * kept + isa::sum(sum);
  peak = now;
  return kept;
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
  float kept[R];
  scores_of<Words, R>(state.queries + i * words, words, packed.keys, last, scores,
                      Foresight::of(soon, soon ? soon->keys : nullptr, words));
  // Vectors of keys behind the last were not multiplied; what stands there is hidden below.
  for (int r = 0; r < R; r++) {
    const int seen = std::min(TILE, job.position(query + r) + 1 - tile);
    for (int k = (last + LANES - 1) / LANES * LANES; k < TILE; k += LANES) isa::store(scores + r * TILE + k, isa::zero());
    kept[r] = weigh<Words>(job.args, packed, scores + r * TILE, job.lowest(query + r) - tile, seen, state.peak[i + r],
                           state.total[i + r], weights + r * TILE / Words::NUMBERS);
  }
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
  const int words = key_tiles::words<Words>(args.head_dim), width = key_tiles::padded(args.head_dim), group = job.group();
  for (int query = job.begin; query < job.end; query++) {
    const int i = query - job.begin;
    const int64_t token = args.bounds[job.row] + query / group, head = job.kv_head * group + query % group;
    const Number* source = (const Number*)args.queries + token * args.query_token_stride + head * args.query_head_stride;
    Words::copy(state.queries + i * words, source, args.head_dim);
    std::fill_n(state.mixed + i * width, width, 0.0f);
    state.peak[i] = NOTHING;
    state.total[i] = 0;
  }
}

template <class Words, class Number>
static void leave(const Job& job, const State<Words>& state) {
  const AttentionArgs& args = job.args;
  const int width = key_tiles::padded(args.head_dim), group = job.group();
  for (int query = job.begin; query < job.end; query++) {
    const int i = query - job.begin;
    const int64_t token = args.bounds[job.row] + query / group, head = job.kv_head * group + query % group;
    Number* target = (Number*)args.out + token * args.out_token_stride + head * args.out_head_stride;
    const F share = isa::set(1.0f / state.total[i]);
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
      const bool before = job.position(query + count - 1) < tile, behind = job.lowest(query) >= tile + TILE;
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
