// Activations as the linear kernels read them: floats, bf16, or int8 with a scale a token and group of columns.
#pragma once

#include <vector>

#include "numbers.h"
#include "rotation.h"
#include "threads.h"

namespace linear {

/// What the words of a panel hold; see `linear.h`.
enum class Format : int32_t { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

/// A layer's weights, packed. All pointers are borrowed.
struct Linear {
  Format format;
  int32_t gated;        // panels come in pairs, gate and up, and the layer gives activation(gate) * up
  Numbers activations;  // what rows become: FP32, BF16, or INT8 with a scale a token and group
  Numbers scale_type, min_type;
  int32_t sparse;       // panels keep two of every four columns; see `sparse_tiles.h`
  int32_t rotated;      // whether rows are rotated behind their input scale; see `rotation.h`
  int64_t outs;            // N; of a gated layer, half the rows of its weight
  int64_t ins;             // C
  int64_t group;           // columns whose sum is scaled apart, a multiple of 8; 0: the whole row
  int64_t groups_a_scale;  // how many of them share a weight scale; 0: there is one an output
  const uint8_t* panels;
  const void* scales;    // (panels, scales a row, PANEL); of one an output (panels, PANEL) floats, or null
  const uint8_t* zeros;  // of INT4, what stands for 0, laid out as scales; null is 8
  const void* mins;      // what 0 stands for, laid out as scales; or null
  const float* bias;     // (N,), or (2N,) of a gated layer, or null
  const float* input_scale;  // (C,), multiplies activations; or null
};

/// Rows ready for a layer; of groups there are (R, G) numbers.
struct Activations {
  uint8_t* data;
  int64_t row_bytes;
  float* scales;      // INT8: of each group
  int32_t* sums;      // INT8: of each group's integers
  float* float_sums;  // where weights have minima or, of float rows, zero points: of what each group stands for
  int64_t num_groups;
};

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOTS = true;
#else
constexpr bool HAS_BF16_DOTS = false;
#endif

static INLINE bool is_integer(Format format) {
  return format == Format::INT8 || format == Format::INT4;
}
/// What rows become for this layer on this machine: where it has no dot products of bf16 or of bytes, the same numbers as
/// floats, or in 16 bits. Nibbles and what is sparse have ways of their own.
static INLINE Numbers row_type(const Linear& layer) {
  if (layer.sparse) return layer.activations;
  if (layer.activations == Numbers::BF16 && !HAS_BF16_DOTS) return Numbers::FP32;
  if (layer.activations == Numbers::INT8 && layer.format == Format::INT8 && isa::HAS_INT16_DOTS) return Numbers::INT16;
  return layer.activations;
}
/// Whether rows are rounded to bf16 and held as floats. For integers they need not be, and stay as they come.
static INLINE bool rounds(const Linear& layer) {
  return layer.activations == Numbers::BF16 && layer.format == Format::BF16 && !layer.sparse && !HAS_BF16_DOTS;
}
static INLINE int64_t num_bytes(Numbers type) {
  return type == Numbers::INT8 ? 1 : type == Numbers::FP32 ? 4 : 2;
}
/// Columns of an output in one word of a panel.
static INLINE int64_t columns_a_word(Format format) {
  switch (format) {
    case Format::FP32: return 1;
    case Format::BF16: return 2;
    case Format::INT8: return 4;
    case Format::INT4: return 8;
  }
  return 0;
}
/// Columns of an output in one step of a panel.
static INLINE int64_t columns_a_step(const Linear& layer) {
  return layer.sparse ? 4 : columns_a_word(layer.format);
}
static inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
static inline int64_t num_groups(const Linear& layer) {
  return layer.group > 0 ? (layer.ins + layer.group - 1) / layer.group : 0;
}
/// Scales that an output has; 0 where it has one.
static inline int64_t scales_a_row(const Linear& layer) {
  return layer.groups_a_scale > 0 ? (num_groups(layer) + layer.groups_a_scale - 1) / layer.groups_a_scale : 0;
}
static inline bool needs_float_sums(const Linear& layer) {
  return layer.mins != nullptr || (layer.zeros != nullptr && layer.activations != Numbers::INT8);
}
/// Whether the layer reads rows of this type as they lie.
static inline bool reads_as_is(const Linear& layer, Numbers type) {
  return type == row_type(layer) && !rounds(layer) && layer.input_scale == nullptr && !layer.rotated &&
         !needs_float_sums(layer) && layer.ins % columns_a_step(layer) == 0;  // steps are read whole
}
/// Bytes of a row as this layer reads it; a multiple of 64, so that rows may be prepared side by side.
static inline int64_t row_bytes(const Linear& layer) {
  return round_up(round_up(layer.ins, 8) * num_bytes(row_type(layer)), 64);
}
static inline int64_t group_bytes(const Linear& layer, int64_t num_rows) {
  return round_up(num_rows * num_groups(layer) * 4, 64);
}
/// Bytes of memory for so many rows.
static inline int64_t activation_bytes(const Linear& layer, int64_t num_rows) {
  return num_rows * row_bytes(layer) + group_bytes(layer, num_rows) * 3;
}
/// Lay out activations in `activation_bytes` of memory, aligned to 64.
static inline Activations lay_out(const Linear& layer, void* memory, int64_t num_rows) {
  uint8_t* data = (uint8_t*)memory;
  uint8_t* groups = data + num_rows * row_bytes(layer);
  const int64_t size = group_bytes(layer, num_rows);
  return {data, row_bytes(layer), (float*)groups, (int32_t*)(groups + size), (float*)(groups + 2 * size),
          num_groups(layer)};
}

/// Numbers of a row behind its input scale, as floats.
template <bool IS_SCALED, class T>
struct Source {
  const T* x;
  const float* input_scale;

  INLINE F whole(int64_t i) const {
    const F value = isa::load(x + i);
    return IS_SCALED ? value * isa::load(input_scale + i) : value;
  }
  /// The first `count` of LANES, which may be none; the others are 0.
  INLINE F some(int64_t i, int64_t count) const {
    if (count >= LANES) return whole(i);
    const int left = (int)(count > 0 ? count : 0);
    const F value = isa::load(x + i, left);
    return IS_SCALED ? value * isa::load(input_scale + i, left) : value;
  }
};

/// Make `width` numbers int8, held as T: symmetric, the largest is 127. Reads `count` of them, the rest are 0. Where
/// `IS_WHOLE`, all are there and fill vectors.
/// A group with NaN or infinity becomes zeros with that for a scale, so that it shows in the result.
template <bool IS_WHOLE, class T, class S>
static INLINE void quantize_group(const S& x, int64_t begin, int64_t count, int64_t width, T* out, float* scale,
                                  int32_t* sum) {
  I most = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const I bits = isa::as_int(isa::abs(IS_WHOLE ? x.whole(begin + i) : x.some(begin + i, count - i)));
    most = bits > most ? bits : most;  // as whole numbers floats without sign keep their order, NaN above infinity
  }
  const int32_t top = isa::largest(most);
  float largest;
  memcpy(&largest, &top, sizeof largest);
  if (!(largest <= 3.40282347e38f)) {
    memset(out, 0, (size_t)width * sizeof(T));
    *scale = largest;
    *sum = 0;
    return;
  }
  const bool is_zero = largest < 1e-30f;  // 127 / largest would overflow
  const F inverse = isa::set(is_zero ? 0.0f : 127.0f / largest);
  I total = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const I whole = isa::to_int((IS_WHOLE ? x.whole(begin + i) : x.some(begin + i, count - i)) * inverse);
    total += whole;
    if (IS_WHOLE) {
      isa::store_narrow(out + i, whole);
    } else {
      const int64_t left = width - i;
      T numbers[LANES];
      isa::store_narrow(numbers, whole);
      memcpy(out + i, numbers, sizeof(T) * (left < LANES ? left : LANES));
    }
  }
  *scale = is_zero ? 0.0f : largest / 127.0f;
  *sum = isa::sum(total);
}

template <class T, class S>
static INLINE void quantize_row(const Linear& layer, const Activations& to, int64_t row, const S& x) {
  T* target = (T*)(to.data + row * to.row_bytes);
  for (int64_t g = 0; g < to.num_groups; g++) {
    const int64_t column = g * layer.group, left = layer.ins - column;
    const int64_t at = row * to.num_groups + g;
    float* scale = to.scales + at;
    int32_t* sum = to.sums + at;
    if (left >= layer.group && layer.group % LANES == 0) {
      quantize_group<true>(x, column, layer.group, layer.group, target + column, scale, sum);
    } else {
      const int64_t count = left < layer.group ? left : layer.group;
      quantize_group<false>(x, column, count, round_up(count, 8), target + column, scale, sum);
    }
    if (needs_float_sums(layer)) to.float_sums[at] = *scale * (float)*sum;
  }
}

/// Write floats or bf16, and zeros behind them until words are whole. `ROUNDS`: floats are rounded to bf16.
template <class T, bool ROUNDS, class S>
static INLINE void copy_row(const Linear& layer, const Activations& to, int64_t row, const S& x) {
  T* target = (T*)(to.data + row * to.row_bytes);
  for (int64_t i = 0; i < layer.ins; i += LANES) {
    const int left = (int)(layer.ins - i < LANES ? layer.ins - i : LANES);
    const F value = x.some(i, left);
    isa::store(target + i, ROUNDS ? isa::widen(isa::narrow(value)) : value, left);
  }
  for (int64_t i = layer.ins; i < round_up(layer.ins, 8); i++) target[i] = 0;
  if (!needs_float_sums(layer)) return;
  for (int64_t g = 0; g < to.num_groups; g++) {
    F sum = isa::zero();
    const int64_t end = (g + 1) * layer.group < layer.ins ? (g + 1) * layer.group : layer.ins;
    for (int64_t i = g * layer.group; i < end; i += LANES) {
      sum += isa::load(target + i, (int)(end - i < LANES ? end - i : LANES));
    }
    to.float_sums[row * to.num_groups + g] = isa::sum(sum);
  }
}

template <class S>
static INLINE void prepare_from(const Linear& layer, const Activations& to, int64_t row, const S& x) {
  switch (row_type(layer)) {
    case Numbers::INT8: return quantize_row<int8_t>(layer, to, row, x);
    case Numbers::INT16: return quantize_row<int16_t>(layer, to, row, x);
    case Numbers::BF16: return copy_row<bf16_t, false>(layer, to, row, x);
    default: break;
  }
  if (rounds(layer)) return copy_row<float, true>(layer, to, row, x);
  copy_row<float, false>(layer, to, row, x);
}

/// The same of a row that is rotated first.
template <class S>
static void prepare_rotated(const Linear& layer, const Activations& to, int64_t row, const S& x) {
  static thread_local std::vector<float> rotated;
  rotated.resize((size_t)layer.ins);
  int64_t i = 0;
  for (; i + rotation::BLOCK <= layer.ins; i += rotation::BLOCK) {
    rotation::block([&](int64_t at) { return x.whole(i + at); }, rotated.data() + i);
  }
  for (; i < layer.ins; i += LANES) {
    const int left = (int)(layer.ins - i < LANES ? layer.ins - i : LANES);
    isa::store(rotated.data() + i, x.some(i, left), left);
  }
  prepare_from(layer, to, row, Source<false, float>{rotated.data(), nullptr});
}

/// Write one row of floats or bf16 as the layer reads it.
template <class T>
void prepare_row(const Linear& layer, const Activations& to, int64_t row, const T* x) {
  const auto prepare = [&](const auto& source) {
    if (layer.rotated) {
      prepare_rotated(layer, to, row, source);
    } else {
      prepare_from(layer, to, row, source);
    }
  };
  if (layer.input_scale != nullptr) {
    prepare(Source<true, T>{x, layer.input_scale});
  } else {
    prepare(Source<false, T>{x, nullptr});
  }
}

// Compiled once, with the linear layers.
extern template void prepare_row(const Linear& layer, const Activations& to, int64_t row, const float* x);
extern template void prepare_row(const Linear& layer, const Activations& to, int64_t row, const bf16_t* x);

/// This thread's share of preparing rows that are `stride` numbers apart.
template <class T>
static void prepare_part(const Linear& layer, const Activations& to, const T* x, int64_t stride, int64_t num_rows,
                         int thread, int num_threads) {
  const Range rows = share(num_rows, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; row++) prepare_row(layer, to, row, x + row * stride);
}

}  // namespace linear
