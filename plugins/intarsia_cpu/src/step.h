// A range of layers in one parallel region: phases over rows of the batch, with barriers between them.
//
// Few rows: every phase is split over the threads by outputs, with a barrier behind each (`layer_by_outputs`). Many rows:
// every thread takes blocks of rows through all phases up to attention, and through all after it, so that what it makes
// stays in its own cache, with three barriers a layer (`layer_by_rows`). Both call the same phases, and no number depends
// on the split: an output is one chain of sums, and a norm is one row's.
//
// Shape legend: T tokens, E embed, H heads, K kv heads, D head dim, F ffn, n rows of a part.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "step_plan.h"
#include "step_parts.h"
#include "threads.h"

namespace step {

/// Rows a block: enough to read weights seldom, few enough for a block's numbers to stay in L2.
constexpr int64_t BLOCK = 64;
/// With so many rows a thread they are split into blocks.
constexpr int64_t ROWS_A_THREAD = 32;

/// What a step's time goes to; `intarsia_cpu/runner.py` names them in this order.
enum Phase { EMBED, NORM, QKV, PLACE, ATTENTION, CONVERT, OUT, UP, DOWN, RESIDUAL, HEAD, NUM_PHASES };

/// Adds up one thread's seconds by phase, waiting included; does nothing where nobody asks.
class Meter {
 public:
  explicit Meter(double* seconds) : seconds_(seconds), last_(seconds ? omp_get_wtime() : 0) {}

  void mark(Phase phase) {
    if (seconds_ == nullptr) return;
    const double now = omp_get_wtime();
    seconds_[phase] += now - last_;
    last_ = now;
  }

 private:
  double* seconds_;
  double last_;
};

/// Numbers of some rows on their way through a layer; row 0 is the part's first.
struct Work {
  uint8_t* inputs;  // what a linear reads, as its format has it
  float* qkv;       // (n, (H + 2K) D)
  uint8_t* ffn;     // (n, F) in the model's dtype
  float* delta;     // (n, E): what a block adds to the residual, where that is normed or scaled first
};

/// Some rows of the batch, and the caller's share of each phase over them.
struct Part {
  int64_t first, count;
  Work work;
  int thread, num_threads;

  Range rows() const { return share(count, thread, num_threads); }
};

/// What all threads share: see `Buffers` for the memory.
struct Step {
  const StepModel& model;
  const StepBatch& batch;
  float* hidden;     // (T, E): the residual stream
  uint8_t* queries;  // (T, H D) in the model's dtype
  uint8_t* mixed;    // (T, H D) likewise: what attention gives
  const Schedules& schedules;
  SpinBarrier& barrier;
  std::atomic<int64_t>* turns;  // blocks taken, one counter for each half of a layer

  bool is_bf16() const { return model.dtype == STEP_BFLOAT16; }
  int64_t number_bytes() const { return is_bf16() ? 2 : 4; }
};

// --- phases ----------------------------------------------------------------------------------------------------------

/// Look tokens up: embeddings, scaled, and learned positions.
static void embed(const Step& step, const Part& part) {
  const Range mine = part.rows();
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const int64_t token = part.first + row;
    embed_row(step.model, step.batch.ids[token], step.batch.positions[token], step.hidden + token * step.model.embed_dim);
  }
}

/// Norm rows of the residual into what `linear` reads, and return that.
static Activations enter(const Step& step, const StepNorm& norm, const Linear& linear, const Part& part) {
  const int64_t width = step.model.embed_dim;
  const Activations inputs = lay_out(linear, part.work.inputs, part.count);
  const Range mine = part.rows();
  for (int64_t row = mine.begin; row < mine.end; row++) {
    norm_into(step.model, norm, linear, step.hidden + (part.first + row) * width, inputs, row);
  }
  return inputs;
}

/// Return what `linear` reads of rows in the model's dtype: themselves where it can, or their other form.
template <typename Sync>
static Activations inputs_of(const Step& step, const Linear& linear, uint8_t* rows, const Part& part, Sync& sync) {
  if (reads_rows(step.model, linear)) {
    return {rows, linear.ins * step.number_bytes(), nullptr, nullptr, nullptr, linear::num_groups(linear)};
  }
  const Activations inputs = lay_out(linear, part.work.inputs, part.count);
  if (step.is_bf16()) {
    prepare_part(linear, inputs, reinterpret_cast<const bf16_t*>(rows), linear.ins, part.count, part.thread,
                 part.num_threads);
  } else {
    prepare_part(linear, inputs, reinterpret_cast<const float*>(rows), linear.ins, part.count, part.thread,
                 part.num_threads);
  }
  sync(CONVERT);
  return inputs;
}

/// Norm and rotate queries and keys; put keys and values into the cache.
static void place(const Step& step, const StepLayer& layer, const StepCache& cache, const Part& part) {
  const int64_t width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
  const int64_t query_bytes = layer.num_heads * layer.head_dim * step.number_bytes();
  const Range mine = part.rows();
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const int64_t token = part.first + row;
    const int64_t slot = step.batch.slots[layer.group][token];
    float* qkv = part.work.qkv + row * width;
    rotate_row(step.model, layer, step.batch.positions[token], qkv);
    write_numbers(step.model, qkv, layer.num_heads * layer.head_dim, step.queries + token * query_bytes);
    if (slot >= 0) write_row(step.model, layer, cache, slot, qkv + layer.num_heads * layer.head_dim);
  }
}

/// What a layer's attention is told.
static AttentionArgs attention_of(const Step& step, int64_t index) {
  const StepLayer& layer = step.model.layers[index];
  return attention_args(step.model, layer, step.batch, step.batch.caches[index], step.queries, step.mixed);
}

/// This thread's share of a layer's attention.
static void attend(const Step& step, int64_t index, int thread) {
  attention_part(attention_of(step, index), step.schedules.of(index), thread);
}

/// Add to the residual what a block gave, behind its norm and its scale.
static void leave(const Step& step, const StepLayer& layer, const StepNorm& norm, const Part& part) {
  const int64_t width = step.model.embed_dim;
  const Range mine = part.rows();
  for (int64_t row = mine.begin; row < mine.end; row++) {
    float* residual = step.hidden + (part.first + row) * width;
    add_normed(step.model, norm, layer.residual_scale, part.work.delta + row * width, residual);
  }
}

/// Run a block's last linear and add its rows to the residual. `then` is the linear after it.
template <typename Sync>
static void finish(const Step& step, const StepLayer& layer, const Linear& linear, uint8_t* rows, const StepNorm& norm,
                   Phase phase, const Linear* then, const Part& part, Sync& sync) {
  const Activations inputs = inputs_of(step, linear, rows, part, sync);
  const int64_t width = step.model.embed_dim;
  if (norm.weight == nullptr) {
    const float scale = static_cast<float>(layer.residual_scale);
    const Output sum{step.hidden + part.first * width, width, 0, 1, Activation::NONE, scale};
    linear_part(linear, inputs, part.count, sum, part.thread, part.num_threads, then);
    sync(phase);
  } else {
    const Output delta{part.work.delta, width, 0, 0, Activation::NONE, 1.0f};
    linear_part(linear, inputs, part.count, delta, part.thread, part.num_threads, then);
    sync(phase);
    leave(step, layer, norm, part);
    sync(RESIDUAL);
  }
}

// --- a layer ---------------------------------------------------------------------------------------------------------

/// Norm, queries, keys and values, rotation, cache.
template <typename Sync>
static void before_attention(const Step& step, const StepLayer& layer, const StepCache& cache, const Part& part,
                             Sync& sync) {
  const Activations inputs = enter(step, layer.attention_norm, layer.qkv, part);
  sync(NORM);
  const Output qkv{part.work.qkv, layer.qkv.outs, 0, 0, Activation::NONE, 1.0f};
  linear_part(layer.qkv, inputs, part.count, qkv, part.thread, part.num_threads, &layer.out);
  sync(QKV);
  place(step, layer, cache, part);
  sync(PLACE);
}

/// The feed-forward's first linear, with its gate and activation, into `work.ffn`.
template <typename Sync>
static void widen(const Step& step, const StepLayer& layer, const Part& part, Sync& sync) {
  const StepNorm& norm = layer.parallel ? layer.attention_norm : layer.mlp_norm;
  const Activations inputs = enter(step, norm, layer.up, part);
  sync(NORM);
  const auto activation = layer.activation == ACTIVATION_SILU ? Activation::SILU : Activation::GELU_TANH;
  const Output ffn{part.work.ffn, layer.up.outs, step.is_bf16(), 0, activation, 1.0f};
  linear_part(layer.up, inputs, part.count, ffn, part.thread, part.num_threads, &layer.down);
  sync(UP);
}

/// All after attention: its output into the residual, and the feed-forward. `then` is the next layer's first linear.
template <typename Sync>
static void after_attention(const Step& step, const StepLayer& layer, const Linear* then, const Part& part,
                            Sync& sync) {
  const int64_t width = layer.num_heads * layer.head_dim * step.number_bytes();
  uint8_t* mixed = step.mixed + part.first * width;
  // In a parallel layer the feed-forward reads the residual as it is before attention adds to it.
  if (layer.parallel) widen(step, layer, part, sync);
  finish(step, layer, layer.out, mixed, layer.attention_post_norm, OUT, &layer.up, part, sync);
  if (!layer.parallel) widen(step, layer, part, sync);
  finish(step, layer, layer.down, part.work.ffn, layer.mlp_post_norm, DOWN, then, part, sync);
}

/// The linear that runs after layer `index`.
static const Linear* linear_after(const StepModel& model, int64_t index) {
  return index + 1 < model.num_layers ? &model.layers[index + 1].qkv : &model.head;
}

static void layer_by_outputs(const Step& step, int64_t index, const Part& part, Meter& meter) {
  const StepLayer& layer = step.model.layers[index];
  auto sync = [&](Phase phase) {
    step.barrier.wait();
    meter.mark(phase);
  };
  before_attention(step, layer, step.batch.caches[index], part, sync);
  attend(step, index, part.thread);
  sync(ATTENTION);
  after_attention(step, layer, linear_after(step.model, index), part, sync);
}

/// Take blocks of rows, in turn, until none is left.
template <typename Run>
static void each_block(const Step& step, std::atomic<int64_t>& turn, int64_t size, const Work& work, Run&& run) {
  const int64_t count = step.batch.num_tokens;
  for (int64_t first; (first = turn.fetch_add(1, std::memory_order_relaxed) * size) < count;) {
    run(Part{first, std::min(size, count - first), work, 0, 1});
  }
}

static void layer_by_rows(const Step& step, int64_t index, int64_t size, const Work& work, int thread, Meter& meter) {
  const StepLayer& layer = step.model.layers[index];
  auto sync = [&meter](Phase phase) { meter.mark(phase); };
  each_block(step, step.turns[0], size, work,
             [&](const Part& part) { before_attention(step, layer, step.batch.caches[index], part, sync); });
  step.barrier.wait();
  meter.mark(PLACE);
  // Behind this barrier nobody counts with the first counter, until the one behind attention has been passed.
  if (thread == 0) step.turns[0].store(0, std::memory_order_relaxed);
  attend(step, index, thread);
  step.barrier.wait();
  meter.mark(ATTENTION);
  each_block(step, step.turns[1], size, work,
             [&](const Part& part) { after_attention(step, layer, linear_after(step.model, index), part, sync); });
  step.barrier.wait();
  meter.mark(DOWN);
  if (thread == 0) step.turns[1].store(0, std::memory_order_relaxed);
}

// --- memory ----------------------------------------------------------------------------------------------------------

/// Cuts one piece of memory into buffers, each at a cache line; measures where there is none.
class Carver {
 public:
  explicit Carver(uint8_t* memory) : memory_(memory) {}

  template <typename T>
  T* take(int64_t count) {
    T* start = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return start;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* memory_;
  int64_t used_ = 0;
};

/// The widest of each kind of row among all layers.
struct Widths {
  int64_t heads = 0, qkv = 0, ffn = 0;

  explicit Widths(const StepModel& model) {
    for (int64_t index = 0; index < model.num_layers; index++) {
      const StepLayer& layer = model.layers[index];
      heads = std::max(heads, layer.num_heads * layer.head_dim);
      qkv = std::max(qkv, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim);
      ffn = std::max(ffn, layer.up.outs);
    }
  }
};

/// Bytes that the widest inputs of a layer's linear take.
static int64_t input_bytes(const StepModel& model, int64_t count) {
  int64_t most = 0;
  for (int64_t index = 0; index < model.num_layers; index++) {
    const StepLayer& layer = model.layers[index];
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down}) {
      most = std::max(most, activation_bytes(*linear, count));
    }
  }
  return most;
}

static Work carve_work(Carver& carver, const StepModel& model, const Widths& widths, int64_t count) {
  Work work;
  work.inputs = carver.take<uint8_t>(input_bytes(model, count));
  work.qkv = carver.take<float>(count * widths.qkv);
  work.ffn = carver.take<uint8_t>(count * widths.ffn * 4);
  work.delta = carver.take<float>(count * model.embed_dim);
  return work;
}

/// How the rows of a step are split: into blocks of some size, or not at all (0).
static int64_t block_size(int64_t num_tokens, int num_threads) {
  if (num_threads == 1) return num_tokens > BLOCK ? BLOCK : 0;
  if (num_tokens < ROWS_A_THREAD * num_threads) return 0;
  // Two blocks a thread at least, of whole eights, so that none waits long for the last.
  const int64_t even = (num_tokens + 2 * num_threads - 1) / (2 * num_threads);
  return std::min(BLOCK, (even + 7) / 8 * 8);
}

/// Bytes of memory that a step of so many tokens takes besides its residual stream.
static int64_t step_bytes(const StepModel& model, int64_t num_tokens, int num_threads) {
  const Widths widths(model);
  const int64_t size = block_size(num_tokens, num_threads);
  Carver carver(nullptr);
  carver.take<float>(num_tokens * widths.heads);
  carver.take<float>(num_tokens * widths.heads);
  for (int i = 0; i < (size ? num_threads : 1); i++) carve_work(carver, model, widths, size ? size : num_tokens);
  return carver.used();
}

/// Run layers `first` to `last` (not it) over the batch; embed first where ids are given. Time by phase is added to
/// `seconds` (NUM_PHASES,), if it is not null.
static void run(const StepModel& model, const StepBatch& batch, int64_t first, int64_t last, float* hidden,
                uint8_t* memory, int num_threads, double* seconds) {
  const Widths widths(model);
  const int64_t count = batch.num_tokens, size = block_size(count, num_threads);
  Carver carver(memory);
  uint8_t* queries = reinterpret_cast<uint8_t*>(carver.take<float>(count * widths.heads));
  uint8_t* mixed = reinterpret_cast<uint8_t*>(carver.take<float>(count * widths.heads));
  const int64_t shared = carver.used();
  Carver measured(nullptr);
  carve_work(measured, model, widths, size ? size : count);
  std::optional<SpinBarrier> barrier;
  std::optional<Schedules> schedules;
  std::atomic<int64_t> turns[2] = {{0}, {0}};
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    {
      const int team = omp_get_num_threads();  // which can be smaller than was asked for
      barrier.emplace(team);
      schedules.emplace(model, batch, first, last, team);
    }
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    const Step step{model, batch, hidden, queries, mixed, *schedules, *barrier, turns};
    Carver mine(memory + shared + (size ? thread * measured.used() : 0));
    const Work work = carve_work(mine, model, widths, size ? size : count);
    const Part all{0, count, work, thread, team};
    Meter meter(thread == 0 ? seconds : nullptr);
    if (batch.ids != nullptr) {
      embed(step, all);
      barrier->wait();
      meter.mark(EMBED);
    }
    for (int64_t index = first; index < last; index++) {
      if (size) {
        layer_by_rows(step, index, size, work, thread, meter);
      } else {
        layer_by_outputs(step, index, all, meter);
      }
    }
  }
}

}  // namespace step
