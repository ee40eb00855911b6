// Activations as the linear kernels read them: floats, bf16, or int8 with a scale a token and group of columns.
#pragma once

#include "isa.h"
#include "threads.h"

namespace linear {

using isa::F;
using isa::I;
using isa::LANES;

enum class Format : int32_t { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

/// A layer's weights, packed. All pointers are borrowed.
struct Linear {
  Format format;
  int32_t gated;    // panels come in pairs, gate and up, and the layer gives activation(gate) * up
  int64_t outs;     // N; of a gated layer, half the rows of its weight
  int64_t ins;      // C
  int64_t group;    // INT8, INT4: columns that share an activation scale; a multiple of 8
  const uint8_t* panels;
  const void* scales;    // INT8: floats (panels, PANEL); INT4: bf16 (panels, groups, PANEL)
  const uint8_t* zeros;  // INT4: what stands for 0, (panels, groups, PANEL); null is 8 everywhere
  const float* bias;     // (N,), or (2N,) of a gated layer, or null
};

/// Rows ready for a layer. `scales` and `sums` are (R, G), for integers alone.
struct Activations {
  uint8_t* data;
  int64_t row_bytes;
  float* scales;
  int32_t* sums;  // of each group's integers
  int64_t num_groups;
};

static INLINE bool is_integer(const Linear& layer) {
  return layer.format == Format::INT8 || layer.format == Format::INT4;
}
static inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
static inline int64_t num_groups(const Linear& layer) {
  return is_integer(layer) ? (layer.ins + layer.group - 1) / layer.group : 0;
}
/// Bytes of a row as this layer reads it; a multiple of 64, so that rows may be prepared side by side.
static inline int64_t row_bytes(const Linear& layer) {
  const int64_t bytes = is_integer(layer)              ? num_groups(layer) * layer.group
                        : layer.format == Format::BF16 ? layer.ins * 2
                                                       : layer.ins * 4;
  return round_up(bytes, 64);
}
/// Bytes of memory for so many rows.
static inline int64_t activation_bytes(const Linear& layer, int64_t num_rows) {
  return num_rows * row_bytes(layer) + round_up(num_rows * num_groups(layer) * 4, 64) * 2;
}
/// Lay out activations in `activation_bytes` of memory, aligned to 64.
static inline Activations lay_out(const Linear& layer, void* memory, int64_t num_rows) {
  uint8_t* data = (uint8_t*)memory;
  const int64_t groups = num_groups(layer);
  uint8_t* scales = data + num_rows * row_bytes(layer);
  uint8_t* sums = scales + round_up(num_rows * groups * 4, 64);
  return {data, row_bytes(layer), (float*)scales, (int32_t*)sums, groups};
}

template <class T>
static INLINE F load_some(const T* source, int64_t count) {
  return count >= LANES ? isa::load(source) : isa::load(source, (int)(count > 0 ? count : 0));
}

/// Make `width` numbers int8: symmetric, the largest is 127. Reads `count` of them, the rest are 0. Where `IS_WHOLE`, all
/// are there and fill vectors.
/// A group with NaN or infinity gets that for a scale, so that it shows in the result.
template <bool IS_WHOLE, class T>
static INLINE void quantize_group(const T* x, int64_t count, int64_t width, int8_t* out, float* scale, int32_t* sum) {
  I most = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const I bits = isa::as_int(isa::abs(IS_WHOLE ? isa::load(x + i) : load_some(x + i, count - i)));
    most = bits > most ? bits : most;  // as whole numbers floats without sign keep their order, NaN above infinity
  }
  const int32_t top = isa::largest(most);
  float largest;
  memcpy(&largest, &top, sizeof largest);
  const bool is_zero = largest < 1e-30f;  // 127 / largest would overflow
  const F inverse = isa::set(is_zero ? 0.0f : 127.0f / largest);
  I total = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const I whole = isa::to_int((IS_WHOLE ? isa::load(x + i) : load_some(x + i, count - i)) * inverse);
    total += whole;
    if (IS_WHOLE) {
      isa::store_int8(out + i, whole);
    } else {
      const int left = (int)(width - i);
      int8_t bytes[LANES];
      isa::store_int8(bytes, whole);
      memcpy(out + i, bytes, left < LANES ? left : LANES);
    }
  }
  *scale = is_zero ? 0.0f : largest / 127.0f;
  *sum = isa::sum(total);
}

/// Write one row of floats or bf16 as the layer reads it.
template <class T>
static void prepare_row(const Linear& layer, const Activations& to, int64_t row, const T* x) {
  uint8_t* target = to.data + row * to.row_bytes;
  const int64_t ins = layer.ins;
  if (is_integer(layer)) {
    for (int64_t g = 0; g < to.num_groups; g++) {
      const int64_t column = g * layer.group, left = ins - column;
      const int64_t at = row * to.num_groups + g;
      int8_t* out = (int8_t*)target + column;
      if (left >= layer.group && layer.group % LANES == 0) {
        quantize_group<true>(x + column, layer.group, layer.group, out, to.scales + at, to.sums + at);
      } else {
        quantize_group<false>(x + column, left < layer.group ? left : layer.group, layer.group, out, to.scales + at,
                              to.sums + at);
      }
    }
  } else if (layer.format == Format::BF16) {
    bf16_t* half = (bf16_t*)target;
    for (int64_t i = 0; i < ins; i += LANES) {
      const int left = (int)(ins - i < LANES ? ins - i : LANES);
      isa::store(half + i, load_some(x + i, left), left);
    }
    if (ins % 2 != 0) half[ins] = 0;
  } else {
    for (int64_t i = 0; i < ins; i += LANES) {
      const int left = (int)(ins - i < LANES ? ins - i : LANES);
      isa::store((float*)target + i, load_some(x + i, left), left);
    }
  }
}

/// This thread's share of preparing rows that are `stride` numbers apart.
template <class T>
static void prepare_part(const Linear& layer, const Activations& to, const T* x, int64_t stride, int64_t num_rows,
                         int thread, int num_threads) {
  const Range rows = share(num_rows, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; row++) prepare_row(layer, to, row, x + row * stride);
}

}  // namespace linear
