// Attention over the pages of a cache, for rows that prefill, decode or verify alike (flash attention, Dao et al. 2022).
//
// A row is one sequence's tokens of the step. Blocks of queries walk the keys in tiles of 64, which begin at multiples of
// 64, in order, with an online softmax. A tile's keys and values are read from their pages once a block and packed as the
// products read them.
//
// A query's bits depend on its own numbers and its keys' alone: its products are one chain an output, in a fixed order;
// a tile that it does not see leaves its state as it was; what a block holds besides, and who computes it, adds nothing.
//
// Legend: T tokens, R rows, H heads, K kv heads, D head dim, S slots a page; a word is 4 bytes: a float, or two bf16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "attention_args.h"
#include "attention_products.h"
#include "attention_work.h"
#include "entries.h"
#include "isa.h"
#include "key_tiles.h"

namespace attention {

using key_tiles::Floats;
using key_tiles::MAX_DIM;
using key_tiles::Pages;
using key_tiles::Places;

// --- blocks ----------------------------------------------------------------------------------------------------------

/// What a block of queries carries from tile to tile.
template <class Words>
struct State {
  alignas(64) typename Words::Word queries[BLOCK * MAX_DIM / Words::NUMBERS];
  alignas(64) float mixed[BLOCK * MAX_DIM];  // weighted values, a multiple of LANES dimensions each
  int token[BLOCK], head[BLOCK], position[BLOCK];
  float peak[BLOCK];                         // the largest score, times log2(e)
  alignas(64) float total[BLOCK * LANES];    // sums of exponentials: those of each lane's keys
};

template <class Words, class Number>
static void enter(const Job& job, State<Words>& state) {
  const AttentionArgs& args = job.args;
  const int words = key_tiles::words<Words>(args.head_dim), width = key_tiles::padded(args.head_dim);
  job.each_row([&](int row, int first, int query, int count) {
    for (int i = first; i < first + count; i++, query++) {
      state.token[i] = args.bounds[row] + query / job.group;
      state.head[i] = job.kv_head * job.group + query % job.group;
      state.position[i] = args.starts[row] + query / job.group;
    }
  });
  for (int i = 0; i < job.end - job.begin; i++) {
    const int64_t offset = state.token[i] * args.query_token_stride + state.head[i] * args.query_head_stride;
    Words::copy(state.queries + i * words, (const Number*)args.queries + offset, args.head_dim);
    std::fill_n(state.mixed + i * width, width, 0.0f);
    state.peak[i] = NOTHING;
    isa::store(state.total + i * LANES, isa::zero());
  }
}

template <class Words, class Number>
static void leave(const Job& job, const State<Words>& state) {
  const AttentionArgs& args = job.args;
  const int width = key_tiles::padded(args.head_dim);
  for (int i = 0; i < job.end - job.begin; i++) {
    Number* target = (Number*)args.out + state.token[i] * args.out_token_stride + state.head[i] * args.out_head_stride;
    const F share = isa::set(1.0f / isa::sum(isa::load(state.total + i * LANES)));
    for (int d = 0; d < args.head_dim; d += LANES) {
      const F value = isa::load(state.mixed + i * width + d) * share;
      isa::store(target + d, value, std::min(LANES, args.head_dim - d));
    }
  }
}

// --- tiles -----------------------------------------------------------------------------------------------------------

/// Let R queries, the block's `first` and those behind it, take in one tile, of whose keys those before `last` are packed;
/// `soon`, if any, is the tile that comes next.
template <class Words, int R>
static void take(const Job& job, int first, int tile, int last, const key_tiles::Tile<Words>& packed, State<Words>& state,
                 const Places* soon) {
  const int words = key_tiles::words<Words>(job.args.head_dim), width = key_tiles::padded(job.args.head_dim);
  alignas(64) float scores[R * TILE];
  alignas(64) typename Words::Word weights[R * TILE / Words::NUMBERS];
  alignas(64) float kept[LANES];
  Seen seen[R];
  scores_of<Words, R>(state.queries + first * words, words, packed.keys, last, scores,
                      Foresight::of(soon, soon ? soon->keys : nullptr, words));
  for (int r = 0; r < R; r++) {
    // Vectors of keys behind the last were not multiplied; what stands there is hidden.
    for (int k = (last + LANES - 1) / LANES * LANES; k < TILE; k += LANES) isa::store(scores + r * TILE + k, isa::zero());
    const int position = state.position[first + r];
    seen[r] = {job.lowest(position) - tile, std::min(TILE, position + 1 - tile)};
  }
  const auto run = packed.scaled ? weigh<Words, R, true> : weigh<Words, R, false>;
  const Scoring scoring{job.args.scale, job.args.soft_cap};
  run(scoring, packed, scores, seen, state.peak + first, state.total + first * LANES, weights, kept);
  const int steps = (last + Words::NUMBERS - 1) / Words::NUMBERS;
  mix_all<Words, R>(weights, kept, steps, packed.values, width, state.mixed + first * width,
                    Foresight::of(soon, soon ? soon->values : nullptr, steps));
}

template <class Words>
static void take_some(int count, const Job& job, int first, int tile, int last, const key_tiles::Tile<Words>& packed,
                      State<Words>& state, const Places* soon) {
  switch (count) {
    case 1: return take<Words, 1>(job, first, tile, last, packed, state, soon);
    case 2: return take<Words, 2>(job, first, tile, last, packed, state, soon);
    case 3: return take<Words, 3>(job, first, tile, last, packed, state, soon);
    case 4: return take<Words, 4>(job, first, tile, last, packed, state, soon);
    case 5: return take<Words, (ROWS > 4 ? 5 : 1)>(job, first, tile, last, packed, state, soon);
    default: return take<Words, (ROWS > 4 ? 6 : 1)>(job, first, tile, last, packed, state, soon);
  }
}

/// The tiles of a job, one after the other.
template <class Entry>
class Walk {
 public:
  explicit Walk(const Job& job) : job_(job), stretches_(job) {}

  /// Go to the next tile, or the first; false where there is none.
  bool next() {
    tile += TILE;
    while (at_ < 0 || tile >= stretches_.all[at_].to) {
      if (++at_ == stretches_.size) return false;
      tile = stretches_.all[at_].from;
    }
    return true;
  }
  const Stretch& stretch() const { return stretches_.all[at_]; }
  Pages<Entry> pages() const {
    const AttentionArgs& args = job_.args;
    const int64_t head = job_.kv_head * args.kv_head_stride, scales = job_.kv_head * args.scale_head_stride;
    return {(const Entry*)args.keys + head,
            (const Entry*)args.values + head,
            args.key_scales + scales,
            args.value_scales + scales,
            args.pages + args.page_bounds[stretch().row],
            args.page_stride,
            args.slot_stride,
            args.scale_page_stride,
            args.scale_slot_stride,
            args.page_size,
            args.head_dim,
            stretch().lowest,
            stretch().highest};
  }

  int tile = 0;

 private:
  const Job& job_;
  const Stretches stretches_;
  int at_ = -1;
};

/// Compute up to BLOCK queries. `next`, if any, is the job that follows.
template <class Words, class Query, class Entry>
static void run(const Job& job, const Job* next) {
  State<Words> state;
  key_tiles::Tile<Words> packed;
  Places places[2];  // of this tile and the next, by turns
  enter<Words, Query>(job, state);
  packed.scaled = Pages<Entry>::SCALED;
  Walk<Entry> walk(job), ahead(job);
  ahead.next();
  ahead.pages().locate(ahead.tile, places[0]);
  for (int turn = 0; walk.next(); turn ^= 1) {
    const Places* soon = &places[turn ^ 1];
    if (ahead.next()) {
      ahead.pages().locate(ahead.tile, places[turn ^ 1]);
    } else if (next != nullptr) {
      Walk<Entry> after(*next);
      after.next();
      after.pages().locate(after.tile, places[turn ^ 1]);
    } else {
      soon = nullptr;
    }
    key_tiles::pack<Words, Entry>(packed, places[turn], job.args.head_dim);
    if constexpr (Pages<Entry>::SCALED) walk.pages().read_scales(walk.tile, places[turn], packed);
    const int end = walk.stretch().end;
    for (int first = walk.stretch().first, count; first < end; first += count) {
      count = std::min(ROWS, end - first);
      const bool before = state.position[first + count - 1] < walk.tile;
      const bool behind = job.lowest(state.position[first]) >= walk.tile + TILE;
      if (before || behind) continue;
      take_some<Words>(count, job, first, walk.tile, places[turn].last, packed, state, soon);
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

}  // namespace attention

/// This thread's share of a layer's attention. `rows` are `bundle`'s, of the same rows and pages.
static void attention_part(const AttentionArgs& args, const attention::Rows& rows, int thread, int num_threads) {
  std::optional<attention::Job> waiting;  // runs when the one behind it is known
  attention::each_job(args, rows, thread, num_threads, [&](const attention::Job& job) {
    if (waiting) attention::run_any(*waiting, &job);
    waiting.emplace(job);
  });
  if (waiting) attention::run_any(*waiting, nullptr);
}
