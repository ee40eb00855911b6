// Weights of few bits, widened in registers to what a dot product reads: bytes, pairs of 16 bits, or floats. All exact.
#pragma once

#include "activations.h"
#include "sparse_tiles.h"

namespace linear {

constexpr int PANEL = 48;
constexpr int VECTORS = PANEL / LANES;
constexpr int64_t STEP_BYTES = 4 * PANEL;
static_assert(sparse::OUTS == PANEL);

/// How the words of a panel are read: as what they are, or widened. INT16 and NIBBLES, a byte each, lie in no panel: it is
/// what INT8 and INT4 become.
enum class Words {
  INT8, INT8_AS_INT16, INT16, INT4, NIBBLES, BF16, BF16_AS_FP32, INT8_AS_BF16, INT4_AS_BF16, FP32, INT8_AS_FP32,
  INT4_AS_FP32, SPARSE_INT8, SPARSE_BF16, SPARSE_FP32
};

/// Dot products that a word takes part in: each has four bytes of a row for the other side.
constexpr int num_parts(Words words) {
  switch (words) {
    case Words::INT4:
    case Words::SPARSE_BF16:
    case Words::BF16_AS_FP32:
    case Words::INT8_AS_INT16:
    case Words::INT8_AS_BF16: return 2;
    case Words::INT4_AS_BF16:
    case Words::SPARSE_FP32:
    case Words::INT8_AS_FP32: return 4;
    case Words::INT4_AS_FP32: return 8;
    default: return 1;
  }
}
/// What words become.
constexpr Words widened(Words words) {
  switch (words) {
    case Words::INT8_AS_INT16: return Words::INT16;
    case Words::INT4: return Words::NIBBLES;
    case Words::SPARSE_INT8: return Words::INT8;
    case Words::SPARSE_BF16:
    case Words::INT8_AS_BF16:
    case Words::INT4_AS_BF16: return Words::BF16;
    case Words::SPARSE_FP32:
    case Words::BF16_AS_FP32:
    case Words::INT8_AS_FP32:
    case Words::INT4_AS_FP32: return Words::FP32;
    default: return words;
  }
}
constexpr bool is_integer(Words words) {
  const Words wide = widened(words);
  return wide == Words::INT8 || wide == Words::INT16 || wide == Words::NIBBLES;
}
/// Bytes of a row's number that these words are multiplied with.
constexpr int64_t number_bytes(Words words) {
  const Words wide = widened(words);
  return wide == Words::FP32 ? 4 : wide == Words::BF16 || wide == Words::INT16 ? 2 : 1;
}
/// Columns of a step.
constexpr int64_t num_columns(Words words) {
  return 4 * num_parts(words) / number_bytes(words);
}
constexpr bool is_sparse(Words words) {
  return words == Words::SPARSE_INT8 || words == Words::SPARSE_BF16 || words == Words::SPARSE_FP32;
}
/// Bytes of a panel's step.
constexpr int64_t step_bytes(Words words) {
  switch (words) {
    case Words::SPARSE_INT8: return sparse::INT8_BYTES;
    case Words::SPARSE_BF16: return sparse::BF16_BYTES;
    case Words::SPARSE_FP32: return sparse::FP32_BYTES;
    default: return STEP_BYTES;
  }
}

static INLINE Words words_of(const Linear& layer) {
  if (layer.sparse) {
    return layer.format == Format::INT8 ? Words::SPARSE_INT8
           : layer.format == Format::BF16 ? Words::SPARSE_BF16 : Words::SPARSE_FP32;
  }
  const Numbers rows = row_type(layer);
  if (layer.format == Format::BF16) return rows == Numbers::BF16 ? Words::BF16 : Words::BF16_AS_FP32;
  if (layer.format == Format::FP32) return Words::FP32;
  const bool is_int4 = layer.format == Format::INT4;
  if (rows == Numbers::BF16) return is_int4 ? Words::INT4_AS_BF16 : Words::INT8_AS_BF16;
  if (rows == Numbers::FP32) return is_int4 ? Words::INT4_AS_FP32 : Words::INT8_AS_FP32;
  return is_int4 ? Words::INT4 : rows == Numbers::INT16 ? Words::INT8_AS_INT16 : Words::INT8;
}

/// The number that stands for 0 in INT4 weights without zero points: widened weights have it taken off.
static INLINE int middle_of(const Linear& layer) {
  return layer.zeros != nullptr || layer.mins != nullptr ? 0 : 8;
}

/// What 4 bits stand for, in a vector to look up.
template <Words WORDS>
struct Table {
  I values;

  explicit INLINE Table(const Linear& layer) : values(isa::set_int(middle_of(layer))) {
#if ISA_AVX512
    if constexpr (WORDS == Words::INT4_AS_FP32) {
      values = isa::as_int(isa::from_int(isa::iota() - values));
    } else if constexpr (WORDS == Words::INT4_AS_BF16) {
      // 32 of 16 bits, the second half as the first: the bit above a nibble does not matter.
      const I even = 2 * (isa::iota() & 7) - values, odd = even + 1;
      values = (I)((U)isa::as_int(isa::from_int(even)) >> 16) | isa::as_int(isa::from_int(odd));
    }
#endif
  }
};

/// Column `column` of INT8 words, or of INT4 words of float rows, as floats.
template <Words WORDS>
static INLINE F float_of(I word, int column, const Table<WORDS>& table) {
  if constexpr (WORDS == Words::INT8_AS_FP32 || WORDS == Words::INT8_AS_BF16) {
    // 2**23 + q + 128 has the byte for its last bits.
    return isa::as_float(((word >> (8 * column)) & 255) | 0x4b000000) - isa::set(8388608.0f + 128.0f);
  } else {
    const I shifted = word >> (4 * (column / 2) + 16 * (column % 2));
#if ISA_AVX512
    return (F)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table.values);
#else
    return isa::from_int((shifted & 15) - table.values);
#endif
  }
}

/// The weights of a word's part.
template <Words WORDS>
static INLINE I part_of(I word, int part, const Table<WORDS>& table) {
  if constexpr (WORDS == Words::INT4) {
    return (part == 0 ? word : word >> 4) & 0x0f0f0f0f;
  } else if constexpr (WORDS == Words::BF16_AS_FP32) {
    return part == 0 ? word << 16 : word & (int32_t)0xffff0000u;
#if ISA_INT16_DOTS
  } else if constexpr (WORDS == Words::INT8_AS_INT16) {
    return part == 0 ? isa::widen_bytes<0>(word) : isa::widen_bytes<1>(word);
#endif
  } else if constexpr (WORDS == Words::INT8_AS_FP32 || WORDS == Words::INT4_AS_FP32) {
    return isa::as_int(float_of<WORDS>(word, part, table));
#if ISA_AVX512
  } else if constexpr (WORDS == Words::INT4_AS_BF16) {
    return (I)_mm512_permutexvar_epi16((__m512i)(word >> (4 * part)), (__m512i)table.values);
#endif
  } else if constexpr (WORDS == Words::INT8_AS_BF16) {
    // The lower halves of these floats are 0.
    const I first = isa::as_int(float_of<WORDS>(word, 2 * part, table));
    return (I)((U)first >> 16) | isa::as_int(float_of<WORDS>(word, 2 * part + 1, table));
  } else {
    return word;
  }
}

/// The weights of vector `v` of a sparse step, in its part `part`.
template <Words WORDS>
static INLINE I sparse_part_of(const uint8_t* step, int v, int part) {
  if constexpr (WORDS == Words::SPARSE_INT8) return sparse::int8_word(step, v);
  if constexpr (WORDS == Words::SPARSE_BF16) return sparse::bf16_pairs(step, v, part);
  return sparse::fp32_column(step, v, part);
}

/// Widen `steps` steps of a panel, asking for what lies `distance` bytes on.
template <Words WORDS>
static __attribute__((noinline)) void widen_steps(const Linear& layer, const uint8_t* from, int64_t steps,
                                                  int64_t distance, uint8_t* to) {
  constexpr int PARTS = num_parts(WORDS);
  const Table<WORDS> table(layer);
  for (int64_t k = 0; k < steps; k++, from += step_bytes(WORDS), to += PARTS * STEP_BYTES) {
    for (int64_t line = 0; line < step_bytes(WORDS); line += 64) isa::prefetch(from + distance + line);
    for (int v = 0; v < VECTORS; v++) {
      const I word = is_sparse(WORDS) ? I{} : isa::load_int(from + 4 * v * LANES);
      UNROLL for (int part = 0; part < PARTS; part++) {
        I weights;
        if constexpr (is_sparse(WORDS)) {
          weights = sparse_part_of<WORDS>(from, v, part);
        } else {
          weights = part_of<WORDS>(word, part, table);
        }
        isa::store_int(to + part * STEP_BYTES + 4 * v * LANES, weights);
      }
    }
  }
}

static inline void widen(const Linear& layer, Words words, const uint8_t* from, int64_t steps, int64_t distance,
                         uint8_t* to) {
  switch (words) {
    case Words::INT4: return widen_steps<Words::INT4>(layer, from, steps, distance, to);
    case Words::INT8_AS_INT16: return widen_steps<Words::INT8_AS_INT16>(layer, from, steps, distance, to);
    case Words::BF16_AS_FP32: return widen_steps<Words::BF16_AS_FP32>(layer, from, steps, distance, to);
    case Words::INT8_AS_FP32: return widen_steps<Words::INT8_AS_FP32>(layer, from, steps, distance, to);
    case Words::INT4_AS_FP32: return widen_steps<Words::INT4_AS_FP32>(layer, from, steps, distance, to);
    case Words::SPARSE_INT8: return widen_steps<Words::SPARSE_INT8>(layer, from, steps, distance, to);
    case Words::SPARSE_BF16: return widen_steps<Words::SPARSE_BF16>(layer, from, steps, distance, to);
    case Words::SPARSE_FP32: return widen_steps<Words::SPARSE_FP32>(layer, from, steps, distance, to);
    default: break;
  }
  if constexpr (HAS_BF16_DOTS) {
    if (words == Words::INT8_AS_BF16) return widen_steps<Words::INT8_AS_BF16>(layer, from, steps, distance, to);
    if (words == Words::INT4_AS_BF16) return widen_steps<Words::INT4_AS_BF16>(layer, from, steps, distance, to);
  }
}

}  // namespace linear
