// What attention is told: one layer's queries, cache and rows.
#pragma once

#include <cstdint>

/// One layer's attention for a step. Strides count elements.
struct AttentionArgs {
  const void* queries;           // (T, H, D), the last axis contiguous
  void* out;                     // (T, H, D), of the queries' type, the last axis contiguous
  const void* keys;              // of all pages
  const void* values;            // with the strides of the keys
  const float* key_scales;       // of int8 entries, else null
  const float* value_scales;     // with the strides of the keys' scales
  const int32_t* bounds;         // R + 1 offsets into T
  const int32_t* starts;         // R positions of the rows' first tokens
  const int32_t* pages;          // the rows' page tables, end to end
  const int32_t* page_bounds;    // R + 1 offsets into `pages`
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t page_stride, kv_head_stride, slot_stride;
  int64_t scale_page_stride, scale_head_stride, scale_slot_stride;
  int32_t num_rows, num_heads, num_kv_heads, head_dim, page_size;
  int32_t window;                // keys that a query sees, itself included; 0 is all
  int32_t queries_bf16;          // whether they are bf16; else float
  int32_t entry;                 // of `entries::Entry`
  float scale;                   // of the products
  float soft_cap;                // scores become cap * tanh(score / cap); 0 is none
};
