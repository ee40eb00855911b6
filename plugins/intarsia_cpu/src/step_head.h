// The head: logits of some tokens of the residual stream, or the likeliest ids alone.
#pragma once

#include <cmath>
#include <limits>

#include "step.h"

namespace step {

using isa::I;
using isa::LANES;

/// Rows at a time: bounds memory, and no number rests on it.
constexpr int64_t HEAD_ROWS = 256;

static int64_t head_bytes(const StepModel& model, int64_t num_rows) {
  return activation_bytes(model.head, std::min(num_rows, HEAD_ROWS));
}

/// Norm rows of the residual stream for the head, in blocks of HEAD_ROWS, on all threads; behind a barrier each thread
/// calls `run(first, inputs, count, thread, num_threads, sync)` for each block, where `sync` waits for all.
template <class Run>
static void each_head_block(const StepModel& model, const float* hidden, const int64_t* rows, int64_t num_rows,
                            uint8_t* memory, int num_threads, double* seconds, Run&& run) {
  std::optional<SpinBarrier> barrier;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    barrier.emplace(omp_get_num_threads());
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    Meter meter(thread == 0 ? seconds : nullptr);
    const auto sync = [&](Phase phase) {
      barrier->wait();
      meter.mark(phase);
    };
    for (int64_t first = 0; first < num_rows; first += HEAD_ROWS) {
      const int64_t count = std::min(HEAD_ROWS, num_rows - first);
      const Activations inputs = lay_out(model.head, memory, count);
      const Range mine = share(count, thread, team);
      for (int64_t row = mine.begin; row < mine.end; row++) {
        norm_into(model, model.norm, model.head, hidden + rows[first + row] * model.embed_dim, inputs, row);
      }
      sync(NORM);
      run(first, inputs, count, thread, team, sync);
    }
  }
}

/// Write fp32 logits (n, V) of the tokens at these rows of the residual stream.
static void logits(const StepModel& model, const float* hidden, const int64_t* rows, int64_t num_rows, float* logits,
                   uint8_t* memory, int num_threads, double* seconds) {
  each_head_block(model, hidden, rows, num_rows, memory, num_threads, seconds,
                  [&](int64_t first, const Activations& inputs, int64_t count, int thread, int team, auto&& sync) {
    float* found = logits + first * model.vocab_size;
    const Output out{found, model.vocab_size, 0, 0, Activation::NONE, 1.0f};
    linear_part(model.head, inputs, count, out, thread, team);
    sync(HEAD);
    const Range mine = share(count, thread, team);
    for (int64_t row = mine.begin; row < mine.end; row++) scale_logits(model, found + row * model.vocab_size);
  });
}

// --- the likeliest id ------------------------------------------------------------------------------------------------

/// The highest logit that one thread met in each lane, and its id. Where one is NaN, that.
struct Best {
  alignas(64) float logits[LANES];
  alignas(64) int32_t ids[LANES];

  void clear() {
    isa::store(logits, isa::set(-std::numeric_limits<float>::infinity()));
    isa::store_int(ids, I{});
  }
  /// Meet the logits of `count` ids from `id` on. Of equal ones the first is kept.
  INLINE void meet(F met, int32_t id, int count) {
    const F before = isa::load(logits);
    const I better = ~(I)(met <= before) & isa::first(count);  // NaN is neither
    if (!isa::any(better)) return;                             // as is common
    isa::store(logits, isa::select(better, met, before));
    isa::store_int(ids, better ? isa::set_int(id) + isa::iota() : isa::load_int(ids));
  }
};

static int64_t likeliest_bytes(const StepModel& model, int64_t num_rows, int64_t num_threads) {
  return head_bytes(model, num_rows) + num_threads * std::min(num_rows, HEAD_ROWS) * static_cast<int64_t>(sizeof(Best));
}

/// Write to `id` and `logit` the best of what threads met, `stride` apart; the id is -1 where the logit is NaN or infinite.
static void conclude(const Best* met, int64_t stride, int num_threads, int64_t* id, float* logit) {
  float best = met->logits[0];
  int32_t at = met->ids[0];
  for (int thread = 0; thread < num_threads; thread++, met += stride) {
    for (int lane = 0; lane < LANES; lane++) {
      const float one = met->logits[lane];
      const bool better = one > best || (one == best && met->ids[lane] < at);
      if (std::isnan(one) || (better && !std::isnan(best))) best = one, at = met->ids[lane];
    }
  }
  *logit = best;
  *id = std::isfinite(best) ? at : -1;
}

/// Write the id (n,) below `num_ids` of the highest logit of each of these tokens, and that logit (n,).
static void likeliest(const StepModel& model, const float* hidden, const int64_t* rows, int64_t num_rows, int64_t num_ids,
                      int64_t* ids, float* best, uint8_t* memory, int num_threads, double* seconds) {
  Best* all = reinterpret_cast<Best*>(memory + head_bytes(model, num_rows));
  each_head_block(model, hidden, rows, num_rows, memory, num_threads, seconds,
                  [&](int64_t first, const Activations& inputs, int64_t count, int thread, int team, auto&& sync) {
    Best* mine = all + thread * count;
    for (int64_t row = 0; row < count; row++) mine[row].clear();
    linear::each_output(model.head, inputs, count, thread, team, [&](int64_t row, int64_t id, F value, int some) {
      const int64_t left = std::min<int64_t>(some, num_ids - id);
      if (left > 0) mine[row].meet(logits_of(model, value), static_cast<int32_t>(id), static_cast<int>(left));
    });
    sync(HEAD);
    const Range part = share(count, thread, team);
    for (int64_t row = part.begin; row < part.end; row++) {
      conclude(all + row, count, team, ids + first + row, best + first + row);
    }
    sync(HEAD);  // what was met is read before the next block begins
  });
}

}  // namespace step
