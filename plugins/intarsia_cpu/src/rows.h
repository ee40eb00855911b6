// What stands between matrix products and attention, a row at a time: norms, rotation, activations, lookups, the cache.
//
// A row's numbers come from that row alone: sums run over its vectors in order, and everything else is number by number.
// All is computed in fp32 and rounded once. Numbers are float or bf16, by the flags of each structure; strides count
// numbers, and the last axis is contiguous.
//
// Legend: T tokens, E embed, H heads, K kv heads, D head dim, F ffn, V vocab.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "entries.h"
#include "isa.h"
#include "threads.h"
#include "vmath.h"

namespace rows {

using isa::F;
using isa::LANES;

/// Call `run(offset, count)` for each vector of a row; the last may have fewer than LANES numbers.
template <class Run>
static INLINE void each_vector(int64_t width, Run&& run) {
  int64_t offset = 0;
  for (; offset + LANES <= width; offset += LANES) run(offset, LANES);
  if (offset < width) run(offset, (int)(width - offset));
}
/// Call `run` with a number of the type that a flag says.
template <class Run>
static INLINE void with_number(int32_t is_bf16, Run&& run) {
  if (is_bf16) {
    run(bf16_t{});
  } else {
    run(float{});
  }
}

// --- norms -----------------------------------------------------------------------------------------------------------

/// The mean of (x - middle)**2.
template <class Number>
static INLINE float mean_square(const Number* row, int64_t width, float middle) {
  F sums[2] = {isa::zero(), isa::zero()};  // by turns, so that additions need not wait for each other
  each_vector(width, [&](int64_t offset, int count) {
    // Lanes behind the row's end hold 0, and must not add the middle's square.
    const F value = isa::select(isa::first(count), isa::load(row + offset, count) - isa::set(middle), isa::zero());
    F& sum = sums[offset / LANES % 2];
    sum = isa::fma(value, value, sum);
  });
  return isa::sum(sums[0] + sums[1]) / (float)width;
}
template <class Number>
static INLINE float mean(const Number* row, int64_t width) {
  F sum = isa::zero();
  each_vector(width, [&](int64_t offset, int count) { sum += isa::load(row + offset, count); });
  return isa::sum(sum) / (float)width;
}

/// x / rms(x) * weight (Zhang and Sennrich 2019). `out` may be `row`.
template <class Number, class Weight, class Out>
static void rms_norm(const Number* row, const Weight* weight, int64_t width, float eps, Out* out) {
  const F scale = isa::set(1.0f / sqrtf(mean_square(row, width, 0.0f) + eps));
  each_vector(width, [&](int64_t offset, int count) {
    isa::store(out + offset, isa::load(row + offset, count) * scale * isa::load(weight + offset, count), count);
  });
}
/// (x - mean) / deviation * weight + bias (Ba et al. 2016); no bias where it is null. `out` may be `row`.
template <class Number, class Weight, class Out>
static void layer_norm(const Number* row, const Weight* weight, const Weight* bias, int64_t width, float eps, Out* out) {
  const float middle = mean(row, width);
  const F scale = isa::set(1.0f / sqrtf(mean_square(row, width, middle) + eps));
  each_vector(width, [&](int64_t offset, int count) {
    F value = (isa::load(row + offset, count) - isa::set(middle)) * scale * isa::load(weight + offset, count);
    if (bias != nullptr) value += isa::load(bias + offset, count);
    isa::store(out + offset, value, count);
  });
}

}  // namespace rows

/// A norm of rows (outer, inner, width), as heads of tokens are.
struct NormArgs {
  const void* x;
  const void* weight;    // (width,)
  const void* bias;      // (width,), of the weight's type, or null
  void* out;             // (outer, inner, width), of x's type, dense
  int64_t outer, inner, outer_stride, inner_stride, width;
  float eps;
  int32_t x_bf16, weight_bf16;
  int32_t centred;       // layer norm; else RMS norm
};

static void norm_part(const NormArgs& args, int thread, int num_threads) {
  const Range mine = share(args.outer * args.inner, thread, num_threads);
  rows::with_number(args.x_bf16, [&](auto number) {
    rows::with_number(args.weight_bf16, [&](auto weight_number) {
      using Number = decltype(number);
      using Weight = decltype(weight_number);
      const Weight* weight = (const Weight*)args.weight;
      for (int64_t i = mine.begin; i < mine.end; i++) {
        const Number* row =
            (const Number*)args.x + i / args.inner * args.outer_stride + i % args.inner * args.inner_stride;
        Number* out = (Number*)args.out + i * args.width;
        if (args.centred) {
          rows::layer_norm(row, weight, (const Weight*)args.bias, args.width, args.eps, out);
        } else {
          rows::rms_norm(row, weight, args.width, args.eps, out);
        }
      }
    });
  });
}

/// total = x + residual, rounded to its type; out = rms_norm(total).
struct AddNormArgs {
  const void* x;         // (T, E)
  const void* residual;  // (T, E), of x's type
  const void* weight;    // (E,)
  void* out;             // (T, E), of x's type, dense
  void* total;           // (T, E), of x's type, dense
  int64_t num_rows, x_stride, residual_stride, width;
  float eps;
  int32_t x_bf16, weight_bf16;
};

static void add_norm_part(const AddNormArgs& args, int thread, int num_threads) {
  const Range mine = share(args.num_rows, thread, num_threads);
  rows::with_number(args.x_bf16, [&](auto number) {
    rows::with_number(args.weight_bf16, [&](auto weight_number) {
      using Number = decltype(number);
      for (int64_t i = mine.begin; i < mine.end; i++) {
        const Number *x = (const Number*)args.x + i * args.x_stride, *residual = (const Number*)args.residual + i * args.residual_stride;
        Number* total = (Number*)args.total + i * args.width;
        rows::each_vector(args.width, [&](int64_t offset, int count) {
          isa::store(total + offset, isa::load(x + offset, count) + isa::load(residual + offset, count), count);
        });
        rows::rms_norm(total, (const decltype(weight_number)*)args.weight, args.width, args.eps, (Number*)args.out + i * args.width);
      }
    });
  });
}

// --- rotation --------------------------------------------------------------------------------------------------------

/// Rotate the pairs (i, i + half) of each head's first 2 half numbers (Su et al. 2021); the others pass.
struct RopeArgs {
  const void* x;      // (T, H, D)
  const void* cos;    // (T, half), dense
  const void* sin;    // (T, half), dense
  void* out;          // (T, H, D), of x's type, dense
  int64_t num_tokens, num_heads, token_stride, head_stride, head_dim, half;
  int32_t x_bf16, angles_bf16;
};

static void rope_part(const RopeArgs& args, int thread, int num_threads) {
  const Range mine = share(args.num_tokens * args.num_heads, thread, num_threads);
  rows::with_number(args.x_bf16, [&](auto number) {
    rows::with_number(args.angles_bf16, [&](auto angle_number) {
      using Number = decltype(number);
      using Angle = decltype(angle_number);
      for (int64_t i = mine.begin; i < mine.end; i++) {
        const int64_t token = i / args.num_heads, head = i % args.num_heads, half = args.half;
        const Number* row = (const Number*)args.x + token * args.token_stride + head * args.head_stride;
        const Angle *cos = (const Angle*)args.cos + token * half, *sin = (const Angle*)args.sin + token * half;
        Number* out = (Number*)args.out + i * args.head_dim;
        rows::each_vector(half, [&](int64_t offset, int count) {
          const isa::F a = isa::load(row + offset, count), b = isa::load(row + half + offset, count);
          const isa::F c = isa::load(cos + offset, count), s = isa::load(sin + offset, count);
          isa::store(out + offset, a * c - b * s, count);
          isa::store(out + half + offset, b * c + a * s, count);
        });
        std::copy(row + 2 * half, row + args.head_dim, out + 2 * half);
      }
    });
  });
}

// --- activations -----------------------------------------------------------------------------------------------------

enum class Activation : int32_t { SILU = 0, GELU_TANH = 1, SOFT_CAP = 2 };

/// out = activation(x), times what stands `width` numbers behind x where it is gated.
struct ActivateArgs {
  const void* x;      // (T, F), or (T, 2F)
  void* out;          // (T, F), of x's type, dense
  int64_t num_rows, stride, width;
  Activation activation;
  float cap;          // of SOFT_CAP
  int32_t gated, x_bf16;
};

namespace rows {

/// Numbers that a thread takes at a time: rows can be few and long.
constexpr int64_t PIECE = 1024;

template <class Number, class Function>
static INLINE void activate(const ActivateArgs& args, int thread, int num_threads, Function&& function) {
  const int64_t pieces = (args.width + PIECE - 1) / PIECE;
  const Range mine = share(args.num_rows * pieces, thread, num_threads);
  for (int64_t i = mine.begin; i < mine.end; i++) {
    const int64_t row = i / pieces, begin = i % pieces * PIECE;
    const Number* x = (const Number*)args.x + row * args.stride + begin;
    Number* out = (Number*)args.out + row * args.width + begin;
    each_vector(std::min(PIECE, args.width - begin), [&](int64_t offset, int count) {
      F value = function(isa::load(x + offset, count));
      if (args.gated) value *= isa::load(x + args.width + offset, count);
      isa::store(out + offset, value, count);
    });
  }
}

}  // namespace rows

static void activate_part(const ActivateArgs& args, int thread, int num_threads) {
  rows::with_number(args.x_bf16, [&](auto number) {
    using Number = decltype(number);
    const isa::F cap = isa::set(args.cap);
    switch (args.activation) {
      case Activation::SILU:
        return rows::activate<Number>(args, thread, num_threads, [](isa::F x) { return vmath::silu(x); });
      case Activation::GELU_TANH:
        return rows::activate<Number>(args, thread, num_threads, [](isa::F x) { return vmath::gelu_tanh(x); });
      case Activation::SOFT_CAP:
        return rows::activate<Number>(args, thread, num_threads, [&](isa::F x) { return vmath::tanh(x / cap) * cap; });
    }
  });
}

// --- lookups ---------------------------------------------------------------------------------------------------------

/// Rows of a table.
struct EmbeddingArgs {
  const int64_t* ids;  // (T,), each below `num_ids`
  const void* table;   // (V, E), dense
  void* out;           // (T, E), dense
  int64_t num_tokens, num_ids, width;
  int32_t table_bf16, out_bf16;
};

static void embedding_part(const EmbeddingArgs& args, int thread, int num_threads) {
  const Range mine = share(args.num_tokens, thread, num_threads);
  rows::with_number(args.table_bf16, [&](auto number) {
    rows::with_number(args.out_bf16, [&](auto out_number) {
      for (int64_t i = mine.begin; i < mine.end; i++) {
        const auto* row = (const decltype(number)*)args.table + args.ids[i] * args.width;
        auto* out = (decltype(out_number)*)args.out + i * args.width;
        rows::each_vector(args.width, [&](int64_t offset, int count) {
          isa::store(out + offset, isa::load(row + offset, count), count);
        });
      }
    });
  });
}

/// The index of each row's largest number, the first of equals; that of the first NaN where there is one, as in torch.
struct ArgmaxArgs {
  const float* x;  // (L, V)
  int64_t* out;    // (L,)
  int64_t num_rows, stride, width;
};

namespace rows {

static int64_t argmax(const float* row, int64_t width) {
  F best = isa::set(-INFINITY), odd = isa::zero();
  each_vector(width, [&](int64_t offset, int count) {
    const F value = isa::select(isa::first(count), isa::load(row + offset, count), isa::set(-INFINITY));
    odd = isa::select(value == value, odd, isa::set(1.0f));
    best = isa::max(value, best);
  });
  if (isa::sum(odd) > 0) return std::find_if(row, row + width, [](float x) { return x != x; }) - row;
  return std::find(row, row + width, isa::largest(best)) - row;
}

}  // namespace rows

static void argmax_part(const ArgmaxArgs& args, int thread, int num_threads) {
  const Range mine = share(args.num_rows, thread, num_threads);
  for (int64_t i = mine.begin; i < mine.end; i++) args.out[i] = rows::argmax(args.x + i * args.stride, args.width);
}

// --- the cache -------------------------------------------------------------------------------------------------------

/// Write each token's key and value to its slot, rounded to the cache's type. Nothing is written for slot -1.
struct CacheWriteArgs {
  const void* keys;    // (T, K, D)
  const void* values;  // (T, K, D)
  void* key_pages;     // of all pages
  void* value_pages;   // with the strides of the keys
  float* key_scales;   // of int8 entries, else null
  float* value_scales;   // with the strides of the keys' scales
  const int64_t* slots;  // (T,): page * page size + offset
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t page_stride, kv_head_stride, slot_stride;
  int64_t scale_page_stride, scale_head_stride, scale_slot_stride;
  int64_t num_tokens, num_kv_heads, head_dim, page_size;
  int32_t x_bf16, entry;  // entry: of `entries::Entry`
};

namespace rows {

/// Write vector `head` of the keys, or of the values, to `place` of its pages, and its scale to `scale`.
template <class Number>
static INLINE void write_entry(const Number* source, int64_t dim, int32_t entry, void* pages, int64_t place, float* scale) {
  if (entry == entries::INT8) {
    *scale = entries::to_int8(source, dim, (int8_t*)pages + place);
  } else if (entry == entries::BF16) {
    each_vector(dim, [&](int64_t offset, int count) {
      isa::store((bf16_t*)pages + place + offset, isa::load(source + offset, count), count);
    });
  } else {
    each_vector(dim, [&](int64_t offset, int count) {
      isa::store((float*)pages + place + offset, isa::load(source + offset, count), count);
    });
  }
}

}  // namespace rows

static void cache_write_part(const CacheWriteArgs& args, int thread, int num_threads) {
  const Range mine = share(args.num_tokens * args.num_kv_heads, thread, num_threads);
  rows::with_number(args.x_bf16, [&](auto number) {
    using Number = decltype(number);
    for (int64_t i = mine.begin; i < mine.end; i++) {
      const int64_t token = i / args.num_kv_heads, head = i % args.num_kv_heads, slot = args.slots[token];
      if (slot < 0) continue;
      const int64_t page = slot / args.page_size, offset = slot % args.page_size;
      const int64_t place = page * args.page_stride + offset * args.slot_stride + head * args.kv_head_stride;
      const int64_t scale =
          page * args.scale_page_stride + offset * args.scale_slot_stride + head * args.scale_head_stride;
      const Number* key = (const Number*)args.keys + token * args.key_token_stride + head * args.key_head_stride;
      const Number* value = (const Number*)args.values + token * args.value_token_stride + head * args.value_head_stride;
      rows::write_entry(key, args.head_dim, args.entry, args.key_pages, place, args.key_scales + scale);
      rows::write_entry(value, args.head_dim, args.entry, args.value_pages, place, args.value_scales + scale);
    }
  });
}
