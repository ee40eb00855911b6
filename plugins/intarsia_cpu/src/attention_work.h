// What attention has to do in a step, in jobs: some queries of one kv head, and the tiles of keys that they take.
//
// The queries of a row's tokens and of the query heads that share a kv head are one list, token by token: query i belongs
// to token i / group and head i % group. Rows whose page tables begin alike, as those behind one system prompt do, are a
// bundle: their lists lie end to end, and the tiles that all of them share are read once (as in cascade inference; Ye et
// al. 2024). Nothing is merged afterwards, so that no bit of a result depends on it: each query takes its own tiles, in
// their order.
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

/// Queries begin..end of a bundle and kv head.
struct Job {
  const AttentionArgs& args;
  const Rows& rows;
  const Bundle& bundle;
  int kv_head, begin, end;
  int group = args.num_heads / args.num_kv_heads;

  /// The first position that a query at a position sees.
  int lowest(int position) const { return args.window ? std::max(0, position - args.window + 1) : 0; }

  /// Call `run(row, first, query, count)` for each row's part: `count` queries from the job's query `first` and the row's
  /// query `query` on.
  template <class Run>
  void each_row(Run&& run) const {
    int offset = -begin;
    for (int i = bundle.begin; i < bundle.end; i++) {
      const int row = rows.order[i], queries = num_queries(args, row);
      const int first = std::max(offset, 0), last = std::min(offset + queries, end - begin);
      if (first < last) run(row, first, first - offset, last - first);
      offset += queries;
    }
  }
};

/// Tiles from..to of a row, which the job's queries first..end take; their keys lie at positions lowest..highest.
struct Stretch {
  int row, from, to, first, end, lowest, highest;
};

/// The stretches of a job in their order: the tiles that all rows share, then each row's own.
struct Stretches {
  int size = 0;
  Stretch all[BLOCK + 1];

  explicit Stretches(const Job& job) {
    const int shared = job.bundle.tiles * TILE;
    if (shared > 0) all[size++] = {job.rows.order[job.bundle.begin], 0, shared, 0, job.end - job.begin, 0, shared};
    job.each_row([&](int row, int first, int query, int count) {
      const int start = job.args.starts[row];
      const int lowest = job.lowest(start + query / job.group), highest = start + (query + count - 1) / job.group + 1;
      all[size++] = {row, std::max(shared, lowest / TILE * TILE), highest, first, first + count, lowest, highest};
    });
  }
};

/// What packing a tile costs, in queries that take it in.
constexpr int64_t PACKING = 4;

/// Tiles that a job's queries take in, and what else they cost.
static int64_t cost(const Job& job) {
  const Stretches stretches(job);
  int64_t sum = 0;
  for (int i = 0; i < stretches.size; i++) {
    const Stretch& stretch = stretches.all[i];
    const int64_t tiles = (stretch.to - stretch.from + TILE - 1) / TILE;
    sum += tiles * (PACKING + stretch.end - stretch.first);
  }
  return sum;
}

/// Call `run(job)` for this thread's share: jobs in the order of (bundle, kv head, query), cut into even costs.
template <class Run>
static void each_job(const AttentionArgs& args, const Rows& rows, int thread, int num_threads, Run&& run) {
  const auto block = [&](const Bundle& bundle, int kv_head, int begin, int queries) {
    return Job{args, rows, bundle, kv_head, begin, std::min(begin + BLOCK, queries)};
  };
  std::vector<int64_t> costs;  // of each block, whatever its kv head
  std::vector<int> sizes;      // queries of each bundle
  int64_t total = 0;
  for (const Bundle& bundle : rows.bundles) {
    int queries = 0;
    for (int i = bundle.begin; i < bundle.end; i++) queries += num_queries(args, rows.order[i]);
    sizes.push_back(queries);
    for (int begin = 0; begin < queries; begin += BLOCK) {
      costs.push_back(cost(block(bundle, 0, begin, queries)));
      total += costs.back() * args.num_kv_heads;
    }
  }
  const Range mine = share(total, thread, num_threads);
  // The part of a block's queries whose cost begins at `at` that lies before `limit`.
  const auto cut = [](int64_t limit, int64_t at, int64_t price, int count) {
    return (int)std::clamp<int64_t>((limit - at) * count / price, 0, count);
  };
  int64_t at = 0;
  size_t first = 0;
  for (size_t b = 0; b < rows.bundles.size() && at < mine.end; b++) {
    const int num_blocks = (sizes[b] + BLOCK - 1) / BLOCK;
    for (int kv_head = 0; kv_head < args.num_kv_heads && at < mine.end; kv_head++) {
      for (int i = 0; i < num_blocks && at < mine.end; i++) {
        const int64_t price = costs[first + i];
        Job job = block(rows.bundles[b], kv_head, i * BLOCK, sizes[b]);
        const int count = job.end - job.begin, from = cut(mine.begin, at, price, count), to = cut(mine.end, at, price, count);
        at += price;
        job.end = job.begin + to;
        job.begin += from;
        if (from < to) run(job);
      }
    }
    first += num_blocks;
  }
}

}  // namespace attention
