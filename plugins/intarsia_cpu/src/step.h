// A range of layers in one parallel region: phases over rows of the batch, with barriers between them.
//
// Few rows: every phase is split over the threads by outputs, with a barrier behind each. Many rows: every thread takes
// blocks of rows through all phases up to attention, and through all after it, so that what it makes stays in its own
// cache, with three barriers a layer (`Way::each_part`). Both call the same phases, and no number depends on the split: an
// output is one chain of sums, and a norm is one row's. So tokens that are read can go through the last layer alone.
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

/// Take blocks of rows, in turn, until none is left.
template <typename Run>
static void each_block(const Step& step, std::atomic<int64_t>& turn, int64_t size, const Work& work, Run&& run) {
  const int64_t count = step.batch.num_tokens;
  for (int64_t first; (first = turn.fetch_add(1, std::memory_order_relaxed) * size) < count;) {
    run(Part{first, std::min(size, count - first), work, 0, 1});
  }
}

/// How one thread goes through a step: its work memory, and the rows of a block, or 0 where phases are split by outputs.
struct Way {
  int64_t size;
  Work work;
  int thread, num_threads;
  Meter& meter;

  /// Call `run(part, sync)` for this thread's share of all rows, one half of a layer; all wait for each other behind it.
  template <typename Run>
  void each_part(const Step& step, int half, Phase last, Run&& run) const {
    if (size == 0) {
      return run(Part{0, step.batch.num_tokens, work, thread, num_threads}, [&](Phase phase) {
        step.barrier.wait();
        meter.mark(phase);
      });
    }
    each_block(step, step.turns[half], size, work,
               [&](const Part& part) { run(part, [&](Phase phase) { meter.mark(phase); }); });
    step.barrier.wait();
    meter.mark(last);
    // Behind this barrier nobody counts with this counter, until another one has been passed.
    if (thread == 0) step.turns[half].store(0, std::memory_order_relaxed);
  }
};

/// A layer up to its keys and values in the cache.
static void to_cache(const Step& step, int64_t index, const Way& way) {
  way.each_part(step, 0, PLACE, [&](const Part& part, auto&& sync) {
    before_attention(step, step.model.layers[index], step.batch.caches[index], part, sync);
  });
}

/// The rest of a layer, from attention on.
static void from_cache(const Step& step, int64_t index, const Way& way) {
  attend(step, index, way.thread);
  step.barrier.wait();
  way.meter.mark(ATTENTION);
  way.each_part(step, 1, DOWN, [&](const Part& part, auto&& sync) {
    after_attention(step, step.model.layers[index], linear_after(step.model, index), part, sync);
  });
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

/// Bytes of all threads' work memory: a block each, or one for all rows.
static int64_t work_bytes(const StepModel& model, const Widths& widths, int64_t num_tokens, int num_threads) {
  const int64_t size = block_size(num_tokens, num_threads);
  Carver carver(nullptr);
  carve_work(carver, model, widths, size ? size : num_tokens);
  return carver.used() * (size ? num_threads : 1);
}

/// One thread's way over so many rows, with its part of that memory.
static Way way_of(const StepModel& model, const Widths& widths, int64_t num_tokens, int num_threads, uint8_t* memory,
                  int thread, int team, Meter& meter) {
  const int64_t size = block_size(num_tokens, num_threads);
  Carver carver(memory + (size ? thread * work_bytes(model, widths, num_tokens, num_threads) / num_threads : 0));
  return {size, carve_work(carver, model, widths, size ? size : num_tokens), thread, team, meter};
}

/// What lies in the memory of a step: rows of queries and of what attention gives; where not all tokens are read, the
/// queries and the residual stream of those that are; then what threads work with.
struct Buffers {
  uint8_t *queries, *mixed, *read_queries;
  float* read_hidden;
  int64_t shared;

  Buffers(uint8_t* memory, const StepModel& model, const Widths& widths, int64_t num_tokens, int64_t num_reads) {
    Carver carver(memory);
    const int64_t num_apart = num_reads < num_tokens ? num_reads : 0;
    queries = reinterpret_cast<uint8_t*>(carver.take<float>(num_tokens * widths.heads));
    mixed = reinterpret_cast<uint8_t*>(carver.take<float>(num_tokens * widths.heads));
    read_queries = reinterpret_cast<uint8_t*>(carver.take<float>(num_apart * widths.heads));
    read_hidden = carver.take<float>(num_apart * model.embed_dim);
    shared = carver.used();
  }
};

/// Bytes of memory that a step of so many tokens, some of which are read, takes besides its residual stream.
static int64_t step_bytes(const StepModel& model, int64_t num_tokens, int64_t num_reads, int num_threads) {
  const Widths widths(model);
  return Buffers(nullptr, model, widths, num_tokens, num_reads).shared +
         std::max(work_bytes(model, widths, num_tokens, num_threads), work_bytes(model, widths, num_reads, num_threads));
}

/// Copy this thread's share of the rows that are read, between where all tokens' lie and where they lie end to end.
template <typename Copy>
static void each_read(const StepBatch& batch, int thread, int team, Copy&& copy) {
  const Range mine = share(batch.num_reads, thread, team);
  for (int64_t i = mine.begin; i < mine.end; i++) copy(i, batch.reads[i]);
}

/// Run the last layer of a range, of which few tokens are read: behind the cache, these alone go on.
static void read_layer(const Step& all, const Step& reads, int64_t index, const Way& way, const Way& read_way) {
  to_cache(all, index, way);
  const StepLayer& layer = all.model.layers[index];
  const int64_t query_bytes = layer.num_heads * layer.head_dim * all.number_bytes(), width = all.model.embed_dim;
  each_read(all.batch, way.thread, way.num_threads, [&](int64_t row, int64_t token) {
    std::copy_n(all.queries + token * query_bytes, query_bytes, reads.queries + row * query_bytes);
    std::copy_n(all.hidden + token * width, width, reads.hidden + row * width);
  });
  all.barrier.wait();
  from_cache(reads, index, read_way);
  each_read(all.batch, way.thread, way.num_threads, [&](int64_t row, int64_t token) {
    std::copy_n(reads.hidden + row * width, width, all.hidden + token * width);
  });
}

/// Run layers `first` to `last` (not it) over the batch; embed first where ids are given. Time by phase is added to
/// `seconds` (NUM_PHASES,), if it is not null.
static void run(const StepModel& model, const StepBatch& batch, int64_t first, int64_t last, float* hidden,
                uint8_t* memory, int num_threads, double* seconds) {
  const Widths widths(model);
  const Buffers buffers(memory, model, widths, batch.num_tokens, batch.num_reads);
  const bool reads_some = batch.num_reads < batch.num_tokens && first < last;
  std::optional<Reads> reads;
  std::optional<SpinBarrier> barrier;
  std::optional<Schedules> schedules, read_schedules;
  std::atomic<int64_t> turns[2] = {{0}, {0}};
  if (reads_some) reads.emplace(batch, model.layers[last - 1].group);
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    {
      const int team = omp_get_num_threads();  // which can be smaller than was asked for
      barrier.emplace(team);
      schedules.emplace(model, batch, first, last - reads_some, team);
      if (reads_some) read_schedules.emplace(model, reads->batch(), last - 1, last, team);
    }
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    const Step step{model, batch, hidden, buffers.queries, buffers.mixed, *schedules, *barrier, turns};
    Meter meter(thread == 0 ? seconds : nullptr);
    const Way way = way_of(model, widths, batch.num_tokens, num_threads, memory + buffers.shared, thread, team, meter);
    if (batch.ids != nullptr) {
      embed(step, Part{0, batch.num_tokens, way.work, thread, team});
      barrier->wait();
      meter.mark(EMBED);
    }
    for (int64_t index = first; index < last - reads_some; index++) {
      to_cache(step, index, way);
      from_cache(step, index, way);
    }
    if (reads_some) {
      const StepBatch& read = reads->batch();
      const Step apart{model, read, buffers.read_hidden, buffers.read_queries, buffers.mixed, *read_schedules, *barrier, turns};
      read_layer(step, apart, last - 1, way,
                 way_of(model, widths, read.num_tokens, num_threads, memory + buffers.shared, thread, team, meter));
    }
  }
}

}  // namespace step
