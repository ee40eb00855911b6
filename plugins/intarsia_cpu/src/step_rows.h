// One row at a time: what stands between the linears and attention of a fused step.
//
// Shape legend: E embed, H heads, K kv heads, D head dim, V vocab.
#pragma once

#include <algorithm>

#include "entries.h"
#include "isa.h"
#include "key_tiles.h"
#include "step_plan.h"
#include "vmath.h"

namespace step {

using isa::F;
using isa::LANES;

/// Call `run(offset, count)` for each vector of a row, the last perhaps with fewer than LANES numbers.
template <typename Run>
static INLINE void each_vector(int64_t width, Run&& run) {
  int64_t offset = 0;
  for (; offset + LANES <= width; offset += LANES) run(offset, LANES);
  if (offset < width) run(offset, static_cast<int>(width - offset));
}

/// Write fp32 numbers in the model's dtype.
static void write_numbers(const StepModel& model, const float* row, int64_t width, void* target) {
  each_vector(width, [&](int64_t offset, int count) {
    const F value = isa::load(row + offset, count);
    if (model.dtype == STEP_BFLOAT16) {
      isa::store(static_cast<bf16_t*>(target) + offset, value, count);
    } else {
      isa::store(static_cast<float*>(target) + offset, value, count);
    }
  });
}

/// Read numbers of the model's dtype, `begin` numbers from the source's start.
static INLINE F read_numbers(const StepModel& model, const void* source, int64_t begin, int count) {
  return model.dtype == STEP_BFLOAT16 ? isa::load(static_cast<const bf16_t*>(source) + begin, count)
                                      : isa::load(static_cast<const float*>(source) + begin, count);
}

/// The embedding of a token, scaled, and that of its position.
static void embed_row(const StepModel& model, int64_t id, int64_t position, float* target) {
  const int64_t width = model.embed_dim;
  const F scale = isa::set(static_cast<float>(model.embedding_scale));
  each_vector(width, [&](int64_t offset, int count) {
    F value = read_numbers(model, model.embed, id * width + offset, count) * scale;
    if (model.positions != nullptr) value += read_numbers(model, model.positions, position * width + offset, count);
    isa::store(target + offset, value, count);
  });
}

// --- norms -----------------------------------------------------------------------------------------------------------

static float mean_square(const float* row, int64_t width, float mean) {
  F sum = isa::zero();
  const F middle = isa::set(mean);
  each_vector(width, [&](int64_t offset, int count) {
    // Lanes behind the row's end hold 0, and must not add the mean's square.
    const F value = isa::select(isa::first(count), isa::load(row + offset, count) - middle, isa::zero());
    sum = isa::fma(value, value, sum);
  });
  return isa::sum(sum) / static_cast<float>(width);
}

static float mean(const float* row, int64_t width) {
  F sum = isa::zero();
  each_vector(width, [&](int64_t offset, int count) { sum += isa::load(row + offset, count); });
  return isa::sum(sum) / static_cast<float>(width);
}

/// x / rms(x) * weight (Zhang and Sennrich 2019). `target` may be `row`.
static void rms_row(const float* row, const float* weight, int64_t width, float eps, float* target) {
  const F scale = isa::set(1.0f / sqrtf(mean_square(row, width, 0.0f) + eps));
  each_vector(width, [&](int64_t offset, int count) {
    isa::store(target + offset, isa::load(row + offset, count) * scale * isa::load(weight + offset, count), count);
  });
}

/// (x - mean) / deviation * weight + bias (Ba et al. 2016). `target` may be `row`.
static void layer_norm_row(const float* row, const StepNorm& norm, int64_t width, float eps, float* target) {
  const float middle = mean(row, width);
  const F scale = isa::set(1.0f / sqrtf(mean_square(row, width, middle) + eps));
  each_vector(width, [&](int64_t offset, int count) {
    F value = (isa::load(row + offset, count) - isa::set(middle)) * scale * isa::load(norm.weight + offset, count);
    if (norm.bias != nullptr) value += isa::load(norm.bias + offset, count);
    isa::store(target + offset, value, count);
  });
}

/// A norm of the model's kind over (E,) numbers.
static void norm_row(const StepModel& model, const StepNorm& norm, const float* row, float* target) {
  const float eps = static_cast<float>(model.eps);
  if (model.norm_kind == NORM_LAYER) {
    layer_norm_row(row, norm, model.embed_dim, eps, target);
  } else {
    rms_row(row, norm.weight, model.embed_dim, eps, target);
  }
}

/// Add a block's output to the residual: residual += scale * norm(delta). Changes `delta`.
static void add_normed(const StepModel& model, const StepNorm& norm, double scale, float* delta, float* residual) {
  if (norm.weight != nullptr) norm_row(model, norm, delta, delta);
  const F factor = isa::set(static_cast<float>(scale));
  each_vector(model.embed_dim, [&](int64_t offset, int count) {
    const F sum = isa::fma(isa::load(delta + offset, count), factor, isa::load(residual + offset, count));
    isa::store(residual + offset, sum, count);
  });
}

// --- queries, keys and values ------------------------------------------------------------------------------------------

/// Norm `num_heads` heads in place: each by a weight (D,), or all together by one of their width.
static void norm_heads(const StepModel& model, const StepLayer& layer, const float* weight, int64_t num_heads,
                       float* heads) {
  const int64_t width = layer.qk_norm == QK_NORM_ALL ? num_heads * layer.head_dim : layer.head_dim;
  const float eps = static_cast<float>(model.eps);
  for (int64_t begin = 0; begin < num_heads * layer.head_dim; begin += width) {
    rms_row(heads + begin, weight, width, eps, heads + begin);
  }
}

/// Rotate the pairs (i, i + h) of a head's first 2h numbers (Su et al. 2021).
static void rotate_head(const float* cos, const float* sin, int64_t half, float* head) {
  each_vector(half, [&](int64_t offset, int count) {
    const F first = isa::load(head + offset, count), second = isa::load(head + half + offset, count);
    const F c = isa::load(cos + offset, count), s = isa::load(sin + offset, count);
    isa::store(head + offset, first * c - second * s, count);
    isa::store(head + half + offset, second * c + first * s, count);
  });
}

/// Norm and rotate a token's queries and keys, which lie end to end, in place.
static void rotate_row(const StepModel& model, const StepLayer& layer, int64_t position, float* qkv) {
  float* keys = qkv + layer.num_heads * layer.head_dim;
  if (layer.qk_norm != QK_NORM_NONE) {
    norm_heads(model, layer, layer.q_norm, layer.num_heads, qkv);
    norm_heads(model, layer, layer.k_norm, layer.num_kv_heads, keys);
  }
  if (layer.cos == nullptr) return;
  const int64_t half = layer.rotary / 2;
  for (int64_t head = 0; head < layer.num_heads + layer.num_kv_heads; head++) {
    rotate_head(layer.cos + position * half, layer.sin + position * half, half, qkv + head * layer.head_dim);
  }
}

/// Write a head's key or value as int8, rounded to the model's dtype first, as the ops hand it over; return its scale.
static float write_int8(const StepModel& model, const float* row, int64_t width, int8_t* target) {
  if (model.dtype != STEP_BFLOAT16) return entries::to_int8(row, width, target);
  bf16_t rounded[key_tiles::MAX_DIM];
  write_numbers(model, row, width, rounded);
  return entries::to_int8(rounded, width, target);
}

/// Write a token's keys and values, (2K D), to its slot.
static void write_row(const StepModel& model, const StepLayer& layer, const StepCache& cache, int64_t slot,
                      const float* keys) {
  const int64_t width = layer.head_dim, page = slot / model.page_size, offset = slot % model.page_size;
  const int64_t place = page * cache.page_stride + offset * cache.slot_stride;
  const int64_t scale = page * cache.scale_page_stride + offset * cache.scale_slot_stride;
  const float* values = keys + layer.num_kv_heads * width;
  for (int64_t head = 0; head < layer.num_kv_heads; head++) {
    const int64_t at = (place + head * cache.head_stride) * entries::bytes(model.cache_entry);
    uint8_t* key = static_cast<uint8_t*>(cache.keys) + at;
    uint8_t* value = static_cast<uint8_t*>(cache.values) + at;
    if (model.cache_entry == entries::INT8) {
      const int64_t scale_at = scale + head * cache.scale_head_stride;
      cache.key_scales[scale_at] = write_int8(model, keys + head * width, width, reinterpret_cast<int8_t*>(key));
      cache.value_scales[scale_at] = write_int8(model, values + head * width, width, reinterpret_cast<int8_t*>(value));
    } else {
      write_numbers(model, keys + head * width, width, key);
      write_numbers(model, values + head * width, width, value);
    }
  }
}

// --- head ------------------------------------------------------------------------------------------------------------

/// Logits of what the head gives.
static INLINE F logits_of(const StepModel& model, F value) {
  const float scale = static_cast<float>(model.logit_scale), cap = static_cast<float>(model.logit_soft_cap);
  if (scale != 1.0f) value = value * isa::set(scale);
  if (cap != 0.0f) value = vmath::tanh(value / isa::set(cap)) * isa::set(cap);
  return value;
}

/// Make logits of a row in place.
static void scale_logits(const StepModel& model, float* logits) {
  if (model.logit_scale == 1.0 && model.logit_soft_cap == 0.0) return;
  each_vector(model.vocab_size, [&](int64_t offset, int count) {
    isa::store(logits + offset, logits_of(model, isa::load(logits + offset, count)), count);
  });
}

}  // namespace step
