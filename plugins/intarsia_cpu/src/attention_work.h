// What attention has to do in a step, in jobs: some queries, and the tiles of keys that they take.
//
// The queries of a row's tokens and of the query heads that share a kv head are one list, token by token: query i belongs
// to token i / group and head i % group. Rows whose page tables begin alike, as those behind one system prompt do, are a
// bundle: their lists lie end to end, and the tiles that all of them share are read once (as in cascade inference; Ye et
// al. 2024). The lists of a bundle's kv heads lie end to end too, and where they are short a job holds those of several
// heads, which take a tile one after the other: a page's heads lie side by side, and memory is read as it lies. Nothing is
// merged afterwards, so that no bit of a result depends on all this: each query takes its own tiles, in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention_args.h"
#include "key_tiles.h"
#include "threads.h"

namespace attention {

using key_tiles::TILE;

constexpr int BLOCK = 96;  // queries whose state is held at once

// --- bundles ---------------------------------------------------------------------------------------------------------

/// Rows order[begin]..order[end - 1], whose first `tiles` tiles of keys lie in the same pages.
struct Bundle {
  int begin, end, tiles;
};
struct Rows {
  std::vector<int32_t> order;
  std::vector<Bundle> bundles;
};

/// Queries of a row and a kv head.
static inline int num_queries(const AttentionArgs& args, int row) {
  return (args.bounds[row + 1] - args.bounds[row]) * (args.num_heads / args.num_kv_heads);
}

/// Tiles of keys that two rows share, and that all of their queries see whole.
static int shared_tiles(const AttentionArgs& args, int a, int b) {
  const int32_t *one = args.pages + args.page_bounds[a], *end = args.pages + args.page_bounds[a + 1];
  const int32_t *other = args.pages + args.page_bounds[b], *other_end = args.pages + args.page_bounds[b + 1];
  const int64_t slots = (std::mismatch(one, end, other, other_end).first - one) * args.page_size;
  return (int)std::min<int64_t>({slots, args.starts[a], args.starts[b]}) / TILE;
}

/// Put rows that share pages side by side. Long rows fill blocks of their own; rows behind windows drop their first pages.
static Rows bundle(const AttentionArgs& args) {
  Rows rows;
  rows.order.resize(args.num_rows);
  std::iota(rows.order.begin(), rows.order.end(), 0);
  const auto pages = [&](int row) { return args.pages + args.page_bounds[row]; };
  if (args.window == 0) {
    std::stable_sort(rows.order.begin(), rows.order.end(), [&](int a, int b) {
      return std::lexicographical_compare(pages(a), pages(a + 1), pages(b), pages(b + 1));
    });
  }
  const auto is_short = [&](int row) { return args.window == 0 && 2 * num_queries(args, row) <= BLOCK; };
  int queries = 0;
  for (int i = 0; i < args.num_rows; i++) {
    const int row = rows.order[i], count = num_queries(args, row);
    Bundle* open = rows.bundles.empty() ? nullptr : &rows.bundles.back();
    if (open != nullptr && is_short(row) && is_short(rows.order[open->begin]) && queries + count <= BLOCK) {
      const int size = open->end - open->begin, common = shared_tiles(args, rows.order[open->begin], row);
      const int tiles = size == 1 ? common : std::min(common, open->tiles);
      if (tiles > 0 && tiles * size >= open->tiles * (size - 1)) {  // as many tiles are spared as without this row
        *open = {open->begin, i + 1, tiles};
        queries += count;
        continue;
      }
    }
    rows.bundles.push_back({i, i + 1, 0});
    queries = count;
  }
  return rows;
}

// --- jobs ------------------------------------------------------------------------------------------------------------

/// Queries begin..end of one kv head's list; the job's query `first` is the first of them.
struct Part {
  int kv_head, begin, end, first;
};

/// Up to BLOCK queries, begin..end, of the lists of a bundle's kv heads, end to end.
struct Job {
  const AttentionArgs& args;
  const Rows& rows;
  const Bundle& bundle;
  int begin, end;
  int group = args.num_heads / args.num_kv_heads;

  int size() const { return end - begin; }
  /// The first position that a query at a position sees.
  int lowest(int position) const { return args.window ? std::max(0, position - args.window + 1) : 0; }

  /// Queries of a kv head.
  int length() const {
    int sum = 0;
    for (int i = bundle.begin; i < bundle.end; i++) sum += num_queries(args, rows.order[i]);
    return sum;
  }
  /// Call `run(row, begin, end)` for each row: a kv head's queries begin..end are the row's.
  template <class Run>
  void each_row(Run&& run) const {
    int offset = 0;
    for (int i = bundle.begin; i < bundle.end; i++) {
      const int row = rows.order[i], queries = num_queries(args, row);
      run(row, offset, offset + queries);
      offset += queries;
    }
  }
};

/// The parts of a job, one a kv head.
struct Parts {
  int size = 0;
  Part all[BLOCK];

  explicit Parts(const Job& job) {
    const int length = job.length();
    for (int at = job.begin; at < job.end;) {
      const int kv_head = at / length, some = std::min((kv_head + 1) * length, job.end) - at;
      all[size++] = {kv_head, at % length, at % length + some, at - job.begin};
      at += some;
    }
  }
  const Part* begin() const { return all; }
  const Part* end() const { return all + size; }
};

/// Tiles from..to of a row, which its queries begin..end of a kv head take; their keys lie at positions lowest..highest.
struct Stretch {
  int row, from, to, lowest, highest, begin, end;

  /// Those of the job's queries that take it, of a part's.
  Range of(const Part& part) const {
    return {part.first + std::max(begin, part.begin) - part.begin, part.first + std::min(end, part.end) - part.begin};
  }
};

/// The stretches of a job in their order: the tiles that all rows share, then each row's own.
struct Stretches {
  int size = 0;
  Stretch all[BLOCK + 1];

  Stretches(const Job& job, const Parts& parts) {
    const int shared = job.bundle.tiles * TILE;
    if (shared > 0) all[size++] = {job.rows.order[job.bundle.begin], 0, shared, 0, shared, 0, job.length()};
    job.each_row([&](int row, int begin, int end) {
      int first = end, last = begin;  // of the row's queries, those that any part has
      for (const Part& part : parts) {
        const int from = std::max(begin, part.begin), to = std::min(end, part.end);
        if (from < to) first = std::min(first, from), last = std::max(last, to);
      }
      if (first >= last) return;
      const int start = job.args.starts[row];
      const int lowest = job.lowest(start + (first - begin) / job.group);
      const int highest = start + (last - 1 - begin) / job.group + 1;
      all[size++] = {row, std::max(shared, lowest / TILE * TILE), highest, lowest, highest, begin, end};
    });
  }
};

/// What packing a tile costs, in queries that take it in.
constexpr int64_t PACKING = 4;

/// Tiles that a job's queries take in, and what else they cost.
static int64_t cost(const Job& job) {
  const Parts parts(job);
  const Stretches stretches(job, parts);
  int64_t sum = 0;
  for (int i = 0; i < stretches.size; i++) {
    const Stretch& stretch = stretches.all[i];
    const int64_t tiles = (stretch.to - stretch.from + TILE - 1) / TILE;
    for (const Part& part : parts) {
      const Range queries = stretch.of(part);
      if (queries.begin < queries.end) sum += tiles * (PACKING + queries.end - queries.begin);
    }
  }
  return sum;
}

// --- shares ----------------------------------------------------------------------------------------------------------

/// The jobs of each thread, in the order of (bundle, kv head, query), cut into even costs: the same for all layers with as
/// many heads and the same rows, pages and window.
class Schedule {
 public:
  Schedule(const AttentionArgs& args, int num_threads)
      : num_heads_(args.num_heads), num_kv_heads_(args.num_kv_heads), window_(args.window), rows_(bundle(args)), spans_(num_threads) {
    std::vector<Span> blocks;
    std::vector<int64_t> costs;
    int64_t total = 0;
    for (const Bundle& bundle : rows_.bundles) {
      const int length = Job{args, rows_, bundle, 0, 0}.length();
      if (length == 0) continue;  // a row without tokens
      const int size = length > BLOCK ? BLOCK : length * std::min(BLOCK / length, args.num_kv_heads);
      const int period = length > BLOCK ? length : length * args.num_kv_heads;  // blocks do not reach across it
      for (int begin = 0, some; begin < length * args.num_kv_heads; begin += some) {
        some = std::min(size, period - begin % period);
        blocks.push_back({&bundle, begin, begin + some});
        costs.push_back(cost(Job{args, rows_, bundle, begin, begin + some}));
        total += costs.back();
      }
    }
    for (int thread = 0; thread < num_threads; thread++) {
      const Range mine = share(total, thread, num_threads);
      int64_t at = 0;
      for (size_t i = 0; i < blocks.size() && at < mine.end; at += costs[i++]) {
        // The part of the block's queries whose cost, which begins at `at`, lies before a limit.
        const auto cut = [&](int64_t limit) {
          const int count = blocks[i].end - blocks[i].begin;
          return blocks[i].begin + (int)std::clamp<int64_t>((limit - at) * count / costs[i], 0, count);
        };
        const Span span{blocks[i].bundle, cut(mine.begin), cut(mine.end)};
        if (span.begin < span.end) spans_[thread].push_back(span);
      }
    }
  }
  Schedule(const Schedule&) = delete;  // spans point into it
  Schedule& operator=(const Schedule&) = delete;

  bool suits(const AttentionArgs& args) const {
    return args.num_heads == num_heads_ && args.num_kv_heads == num_kv_heads_ && args.window == window_;
  }
  int num_jobs(int thread) const { return (int)spans_[thread].size(); }
  Job job(const AttentionArgs& args, int thread, int index) const {
    const Span& span = spans_[thread][index];
    return {args, rows_, *span.bundle, span.begin, span.end};
  }

 private:
  struct Span {
    const Bundle* bundle;
    int begin, end;
  };
  int num_heads_, num_kv_heads_, window_;
  Rows rows_;
  std::vector<std::vector<Span>> spans_;
};

}  // namespace attention

/// This thread's share of a layer's attention. The schedule is that of its rows, pages, heads and window.
void attention_part(const AttentionArgs& args, const attention::Schedule& schedule, int thread);
