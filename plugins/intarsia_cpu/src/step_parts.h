// The parts of other areas as the fused step calls them: linears and attention.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include "attention.h"
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
