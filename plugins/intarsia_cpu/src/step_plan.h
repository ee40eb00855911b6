// What the fused step reads: a model, a batch and buffers, as plain pointers and sizes that Python fills in.
//
// `intarsia_cpu/plan.py` mirrors these structures field by field; all fields take eight bytes, so that no compiler pads
// them otherwise.
//
// Shape legend: T tokens, R rows, E embed, H heads, K kv heads, D head dim, F ffn, V vocab, P pages, S slots a page.
#pragma once

#include <cstdint>

#include "linear.h"

/// Numbers of activations and cache: fp32, or bf16 with fp32 sums and an fp32 residual stream.
enum StepDtype : int64_t { STEP_FLOAT32 = 0, STEP_BFLOAT16 = 1 };
enum StepNormKind : int64_t { NORM_RMS = 0, NORM_LAYER = 1 };
enum StepQkNorm : int64_t { QK_NORM_NONE = 0, QK_NORM_HEAD = 1, QK_NORM_ALL = 2 };
enum StepActivation : int64_t { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1 };

/// (E,) fp32 weight and bias. No weight: there is no norm, and what it reads passes.
struct StepNorm {
  const float* weight;
  const float* bias;
};

struct StepLayer {
  StepNorm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  const float* q_norm;  // (D,) or (H D,) fp32, as qk_norm says
  const float* k_norm;
  const float* cos;  // (positions, rotary / 2) fp32; null where nothing is rotated
  const float* sin;
  linear::Linear qkv, out, up, down;
  int64_t qk_norm, num_heads, num_kv_heads, head_dim, rotary, window, group, activation, parallel;
  double scale, soft_cap, residual_scale;  // soft_cap 0: none
};

struct StepModel {
  const void* embed;      // (V, E) in the model's dtype
  const void* positions;  // (num_positions, E) in the model's dtype, or null
  const StepLayer* layers;
  StepNorm norm;
  linear::Linear head;
  int64_t dtype, embed_dim, vocab_size, num_layers, norm_kind, page_size;
  int64_t cache_entry;  // of `entries::Entry`: the model's dtype, or int8
  double eps, embedding_scale, logit_scale, logit_soft_cap;  // logit_soft_cap 0: none
};

/// One layer's tensors of the cache, (P, K, S, D) with D dense, and scales (P, K, S) of int8 entries, else null; strides
/// count numbers.
struct StepCache {
  void* keys;
  void* values;
  float* key_scales;
  float* value_scales;
  int64_t page_stride, head_stride, slot_stride;
  int64_t scale_page_stride, scale_head_stride, scale_slot_stride;
};

/// The rows of a step. Groups of page tables lie end to end.
struct StepBatch {
  const int64_t* ids;        // (T,); null where the residual stream is given
  const int64_t* positions;  // (T,)
  const int64_t* const* slots;  // a group: (T,), -1 is nowhere
  const int32_t* bounds;     // (R + 1,) offsets into T
  const int32_t* starts;     // (R,) position of each row's first token
  const int32_t* const* pages;       // a group: the page tables of all rows, end to end
  const int32_t* const* page_bounds;  // a group: (R + 1,) offsets into them
  const StepCache* caches;   // a layer
  const int64_t* reads;      // (num_reads,) the tokens whose residual stream is read, ascending; unless these are all
  int64_t num_tokens, num_rows, num_reads;
};
