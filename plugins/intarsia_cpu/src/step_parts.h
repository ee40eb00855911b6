// The parts of other areas as the fused step calls them: linears and attention.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include "attention_work.h"
#include "linear.h"
#include "step_rows.h"

namespace step {

using linear::Activation;
using linear::activation_bytes;
using linear::Activations;
using linear::lay_out;
using linear::Linear;
using linear::linear_part;
using linear::Output;
using linear::prepare_part;

/// Whether a linear reads rows in the model's dtype as they lie end to end.
static bool reads_rows(const StepModel& model, const Linear& linear) {
  return linear::reads_as_is(linear, model.dtype == STEP_FLOAT32 ? linear::Numbers::FP32 : linear::Numbers::BF16);
}

/// Norm a row of the residual, where there is a norm, and write it as `linear` reads it.
static void norm_into(const StepModel& model, const StepNorm& norm, const Linear& linear, const float* row,
                      const Activations& inputs, int64_t index) {
  if (norm.weight == nullptr) return linear::prepare_row(linear, inputs, index, row);
  static thread_local std::vector<float> normed;
  normed.resize(model.embed_dim);
  norm_row(model, norm, row, normed.data());
  linear::prepare_row(linear, inputs, index, normed.data());
}

/// What attention is told of a layer.
static AttentionArgs attention_args(const StepModel& model, const StepLayer& layer, const StepBatch& batch,
                                    const StepCache& cache, const uint8_t* queries, uint8_t* mixed) {
  AttentionArgs args{};
  args.queries = queries;
  args.out = mixed;
  args.keys = cache.keys;
  args.values = cache.values;
  args.key_scales = cache.key_scales;
  args.value_scales = cache.value_scales;
  args.bounds = batch.bounds;
  args.starts = batch.starts;
  args.pages = batch.pages[layer.group];
  args.page_bounds = batch.page_bounds[layer.group];
  args.query_token_stride = args.out_token_stride = layer.num_heads * layer.head_dim;
  args.query_head_stride = args.out_head_stride = layer.head_dim;
  args.page_stride = cache.page_stride;
  args.kv_head_stride = cache.head_stride;
  args.slot_stride = cache.slot_stride;
  args.scale_page_stride = cache.scale_page_stride;
  args.scale_head_stride = cache.scale_head_stride;
  args.scale_slot_stride = cache.scale_slot_stride;
  args.num_rows = static_cast<int32_t>(batch.num_rows);
  args.num_heads = static_cast<int32_t>(layer.num_heads);
  args.num_kv_heads = static_cast<int32_t>(layer.num_kv_heads);
  args.head_dim = static_cast<int32_t>(layer.head_dim);
  args.page_size = static_cast<int32_t>(model.page_size);
  args.window = static_cast<int32_t>(layer.window);
  args.queries_bf16 = model.dtype == STEP_BFLOAT16;
  args.entry = static_cast<int32_t>(model.cache_entry);
  args.scale = static_cast<float>(layer.scale);
  args.soft_cap = static_cast<float>(layer.soft_cap);
  return args;
}

/// The tokens of a batch that are read, as rows of a batch of their own: neighbours of a row are a row.
class Reads {
 public:
  Reads(const StepBatch& batch, int64_t group) : page_tables_(group + 1), page_limits_(group + 1), batch_(batch) {
    const int32_t *pages = batch.pages[group], *limits = batch.page_bounds[group];
    for (int64_t i = 0, row = 0; i < batch.num_reads; i++) {
      const int64_t token = batch.reads[i];
      if (i > 0 && token == batch.reads[i - 1] + 1 && token < batch.bounds[row + 1]) continue;
      while (token >= batch.bounds[row + 1]) row++;
      bounds_.push_back(static_cast<int32_t>(i));
      starts_.push_back(static_cast<int32_t>(batch.starts[row] + token - batch.bounds[row]));
      page_bounds_.push_back(static_cast<int32_t>(pages_.size()));
      pages_.insert(pages_.end(), pages + limits[row], pages + limits[row + 1]);
    }
    bounds_.push_back(static_cast<int32_t>(batch.num_reads));
    page_bounds_.push_back(static_cast<int32_t>(pages_.size()));
    page_tables_[group] = pages_.data();
    page_limits_[group] = page_bounds_.data();
    batch_.bounds = bounds_.data();
    batch_.starts = starts_.data();
    batch_.pages = page_tables_.data();
    batch_.page_bounds = page_limits_.data();
    batch_.num_tokens = batch.num_reads;
    batch_.num_rows = static_cast<int64_t>(starts_.size());
  }
  Reads(const Reads&) = delete;  // the batch points into it
  Reads& operator=(const Reads&) = delete;

  /// As attention reads it, in layers of the group.
  const StepBatch& batch() const { return batch_; }

 private:
  std::vector<int32_t> bounds_, starts_, pages_, page_bounds_;
  std::vector<const int32_t*> page_tables_, page_limits_;
  StepBatch batch_;
};

/// How the threads share attention, layer by layer: layers of a cache group mostly are alike.
class Schedules {
 public:
  Schedules(const StepModel& model, const StepBatch& batch, int64_t first, int64_t last, int num_threads) : of_layer_(last) {
    std::map<int64_t, std::vector<const attention::Schedule*>> of_group;
    for (int64_t index = first; index < last; index++) {
      const StepLayer& layer = model.layers[index];
      const AttentionArgs args = attention_args(model, layer, batch, batch.caches[index], nullptr, nullptr);
      auto& made = of_group[layer.group];
      auto found = std::find_if(made.begin(), made.end(), [&](const auto* one) { return one->suits(args); });
      if (found == made.end()) found = made.insert(found, &all_.emplace_back(args, num_threads));
      of_layer_[index] = *found;
    }
  }
  const attention::Schedule& of(int64_t layer) const { return *of_layer_[layer]; }

 private:
  std::deque<attention::Schedule> all_;
  std::vector<const attention::Schedule*> of_layer_;
};

}  // namespace step
