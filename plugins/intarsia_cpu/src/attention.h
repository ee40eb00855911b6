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
#include <type_traits>

#include "attention_args.h"
#include "attention_products.h"
#include "attention_work.h"
#include "entries.h"
#include "isa.h"
#include "key_tiles.h"

namespace attention {

using key_tiles::Floats;
using key_tiles::Foresight;
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
static void enter(const Job& job, const Parts& parts, State<Words>& state) {
  const AttentionArgs& args = job.args;
  const int words = key_tiles::words<Words>(args.head_dim), width = key_tiles::padded(args.head_dim);
  for (const Part& part : parts) {
    job.each_row([&](int row, int begin, int end) {
      for (int q = std::max(begin, part.begin); q < std::min(end, part.end); q++) {
        const int i = part.first + q - part.begin, token = (q - begin) / job.group;
        state.token[i] = args.bounds[row] + token;
        state.head[i] = part.kv_head * job.group + (q - begin) % job.group;
        state.position[i] = args.starts[row] + token;
      }
    });
  }
  for (int i = 0; i < job.size(); i++) {
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
  for (int i = 0; i < job.size(); i++) {
    Number* target = (Number*)args.out + state.token[i] * args.out_token_stride + state.head[i] * args.out_head_stride;
    const F share = isa::set(1.0f / isa::sum(isa::load(state.total + i * LANES)));
    for (int d = 0; d < args.head_dim; d += LANES) {
      const F value = isa::load(state.mixed + i * width + d) * share;
      isa::store(target + d, value, std::min(LANES, args.head_dim - d));
    }
  }
}

// --- tiles -----------------------------------------------------------------------------------------------------------

/// Let R queries, the block's `first` and those behind it, take in one tile, of whose keys those before `last` are packed.
template <class Words, int R>
static void take(const Job& job, int first, int tile, int last, const key_tiles::Tile<Words>& packed, State<Words>& state,
                 Foresight* foresight) {
  const int words = key_tiles::words<Words>(job.args.head_dim), width = key_tiles::padded(job.args.head_dim);
  alignas(64) float scores[R * TILE];
  alignas(64) typename Words::Word weights[R * TILE / Words::NUMBERS];
  alignas(64) float kept[LANES];
  Seen seen[R];
  scores_of<Words, R>(state.queries + first * words, words, packed.keys, last, scores, foresight);
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
  mix_all<Words, R>(weights, kept, steps, packed.values, width, state.mixed + first * width, foresight);
}

template <class Words>
static void take_some(int count, const Job& job, int first, int tile, int last, const key_tiles::Tile<Words>& packed,
                      State<Words>& state, Foresight* foresight) {
  switch (count) {
    case 1: return take<Words, 1>(job, first, tile, last, packed, state, foresight);
    case 2: return take<Words, 2>(job, first, tile, last, packed, state, foresight);
    case 3: return take<Words, 3>(job, first, tile, last, packed, state, foresight);
    case 4: return take<Words, 4>(job, first, tile, last, packed, state, foresight);
    case 5: return take<Words, (ROWS > 4 ? 5 : 1)>(job, first, tile, last, packed, state, foresight);
    default: return take<Words, (ROWS > 4 ? 6 : 1)>(job, first, tile, last, packed, state, foresight);
  }
}

/// The tiles of a job, one after the other.
class Walk {
 public:
  Walk(const Job& job, const Parts& parts) : stretches_(job, parts) {}

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

  int tile = 0;

 private:
  const Stretches stretches_;
  int at_ = -1;
};

/// Where a kv head's keys and values of a stretch lie.
template <class Entry>
static Pages<Entry> pages_of(const AttentionArgs& args, const Stretch& stretch, int kv_head) {
  const int64_t head = kv_head * args.kv_head_stride, scales = kv_head * args.scale_head_stride;
  return {(const Entry*)args.keys + head,
          (const Entry*)args.values + head,
          args.key_scales + scales,
          args.value_scales + scales,
          args.pages + args.page_bounds[stretch.row],
          args.page_stride,
          args.slot_stride,
          args.scale_page_stride,
          args.scale_slot_stride,
          args.page_size,
          args.head_dim,
          stretch.lowest,
          stretch.highest};
}

/// Goes ahead of a thread's jobs, from tile to tile, and foresees what they will read.
class Scout {
 public:
  Scout(const AttentionArgs& args, const Schedule& schedule, int thread) : args_(args), schedule_(schedule), thread_(thread) {}

  /// Go to the next tile, or the first; false where there is none.
  bool next() {
    while (!walk_ || !walk_->next()) {
      walk_.reset();
      if (index_ == schedule_.num_jobs(thread_)) return false;
      const Job job = schedule_.job(args_, thread_, index_++);
      parts_.emplace(job);
      walk_.emplace(job, *parts_);
    }
    return true;
  }
  /// Foresee tiles until so many bytes are not asked for yet, or all are.
  template <class Entry>
  void look(int64_t bytes, Foresight& foresight) {
    while (foresight.bytes() < bytes && foresight.has_room() && next()) {
      const Pages<Entry> pages = pages_of<Entry>(args_, walk_->stretch(), parts_->all[0].kv_head);
      pages.foresee(walk_->tile, parts_->size, args_.kv_head_stride, args_.scale_head_stride, foresight);
    }
  }

 private:
  const AttentionArgs& args_;
  const Schedule& schedule_;
  const int thread_;
  int index_ = 0;
  std::optional<Parts> parts_;
  std::optional<Walk> walk_;
};

/// Let those queries of a part that see it take a tile in.
template <class Words>
static void take_part(const Job& job, Range queries, int tile, int last, const key_tiles::Tile<Words>& packed,
                      State<Words>& state, Foresight& foresight) {
  for (int first = (int)queries.begin, count; first < queries.end; first += count) {
    count = std::min(ROWS, (int)queries.end - first);
    const bool before = state.position[first + count - 1] < tile;
    const bool behind = job.lowest(state.position[first]) >= tile + TILE;
    if (before || behind) continue;
    // The last of them sees the most: positions ascend, but for tiles that rows share, which all of them see whole.
    const int seen = std::min(last, state.position[first + count - 1] + 1 - tile);
    take_some<Words>(count, job, first, tile, seen, packed, state, foresight.is_over() ? nullptr : &foresight);
  }
}

/// Bytes of whole tiles of some kv heads.
template <class Entry>
static int64_t tile_bytes(const AttentionArgs& args, int heads) {
  return 2 * heads * TILE * args.head_dim * (int64_t)sizeof(Entry);
}

template <class Words, class Query, class Entry>
static void run(const Job& job, Scout& scout, Foresight& foresight) {
  State<Words> state;
  key_tiles::Tile<Words> packed;
  Places places;
  const Parts parts(job);
  enter<Words, Query>(job, parts, state);
  packed.scaled = Pages<Entry>::SCALED;
  for (Walk walk(job, parts); walk.next();) {
    // While a tile is worked on as much is asked for as it has.
    scout.look<Entry>(tile_bytes<Entry>(job.args, parts.size), foresight);
    for (const Part& part : parts) {
      const Range queries = walk.stretch().of(part);
      if (queries.begin >= queries.end) continue;
      const Pages<Entry> pages = pages_of<Entry>(job.args, walk.stretch(), part.kv_head);
      pages.locate(walk.tile, places);
      key_tiles::pack<Words, Entry>(packed, places, job.args.head_dim, foresight);
      if constexpr (Pages<Entry>::SCALED) pages.read_scales(walk.tile, packed);
      take_part<Words>(job, queries, walk.tile, places.last, packed, state, foresight);
    }
  }
  leave<Words, Query>(job, state);
}

template <class Run>
static void with_entry(const AttentionArgs& args, Run&& run) {
  switch (args.entry) {
    case entries::INT8: return run(int8_t());
    case entries::BF16: return run(bf16_t());
    default: return run(float());
  }
}

}  // namespace attention
