// Tiles of 64 keys and values, read from the pages of a cache and packed as attention's products read them: keys with a
// tile's keys side by side, values with a key's (or two keys') dimensions side by side. Of int8 entries the numbers are
// packed, which floats and bf16 hold exactly; their scales stand beside, for scores and weights to be multiplied by.
//
// Only slots that hold what a query of the block sees are read. The others are zeros: a weight of 0 would not hide NaN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "entries.h"
#include "isa.h"

namespace key_tiles {

using isa::F;
using isa::I;
using isa::LANES;

constexpr int TILE = 64;
constexpr int MAX_DIM = 256;

// --- words: what products are made of -------------------------------------------------------------------------------

/// A float a word.
struct Floats {
  using Word = float;
  using Vector = F;
  static constexpr int NUMBERS = 1;

  static INLINE Vector load(const Word* source) { return isa::load(source); }
  static INLINE Vector broadcast(const Word* source) { return isa::set(*source); }
  static INLINE void multiply_add(F& sum, Vector a, Vector b) { isa::fma_into(sum, a, b); }
  static INLINE void store_weights(Word* target, F weights) { isa::store(target, weights); }
  static INLINE void store(Word* target, Vector words) { isa::store(target, words); }

  /// The words of up to LANES numbers; the rest are zeros.
  template <class Number>
  static INLINE Vector row(const Number* source, int count) {
    return count >= LANES ? isa::load(source) : isa::load(source, count);
  }
  static INLINE Vector row(const int8_t* source, int count) { return entries::load(source, count); }
  template <class Number>
  static void copy(Word* target, const Number* source, int count) {
    for (int d = 0; d < count; d += LANES) {
      const int some = std::min(LANES, count - d);
      isa::store(target + d, row(source + d, some), some);
    }
  }
};

#if ISA_AVX512 && defined(__AVX512BF16__)
/// Two bf16 a word, the first in the lower half.
struct Pairs {
  using Word = uint32_t;
  using Vector = I;
  static constexpr int NUMBERS = 2;

  static INLINE Vector load(const Word* source) { return isa::load_int(source); }
  static INLINE Vector broadcast(const Word* source) { return isa::broadcast4(source); }
  static INLINE void multiply_add(F& sum, Vector a, Vector b) { isa::dot2_into(sum, a, b); }
  static INLINE void store_weights(Word* target, F weights) { isa::store((bf16_t*)target, weights); }
  static INLINE void store(Word* target, Vector words) { isa::store_int(target, words); }

  static INLINE Vector row(const bf16_t* source, int count) {
    if (count >= 2 * LANES) return isa::load_int(source);
    return (I)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), source);
  }
  static INLINE Vector row(const int8_t* source, int count) {
    const F lower = entries::load(source, std::min(count, LANES));
    const F upper = count > LANES ? entries::load(source + LANES, count - LANES) : isa::zero();
    return (I)_mm512_cvtne2ps_pbh((__m512)upper, (__m512)lower);
  }
  static void copy(Word* target, const bf16_t* source, int count) {
    target[(count - 1) / 2] = 0;
    memcpy(target, source, sizeof(bf16_t) * (size_t)count);
  }
};
using Halves = Pairs;
#else
using Halves = Floats;  // bf16 is widened where there is no product of it
#endif

/// Words that `dim` numbers take.
template <class Words>
static INLINE int words(int dim) {
  return (dim + Words::NUMBERS - 1) / Words::NUMBERS;
}
/// Numbers, rounded up to vectors of floats.
static INLINE int padded(int dim) {
  return (dim + LANES - 1) / LANES * LANES;
}

template <class Words>
struct Tile {
  alignas(64) typename Words::Word keys[MAX_DIM / Words::NUMBERS * TILE];    // [word of the dimensions][key]
  alignas(64) typename Words::Word values[TILE / Words::NUMBERS * MAX_DIM];  // [word of the keys][dimension, padded]
  alignas(64) float key_scales[TILE], value_scales[TILE];                    // of int8 entries
  bool scaled;                                                               // whether the entries are int8
};

/// Where the keys and values of a tile lie, in bytes: of its positions, first..last may be read.
struct Places {
  const char *keys, *values;
  int row_bytes, first = 0, last = 0;
  int64_t offsets[TILE];

  template <class Entry>
  INLINE const Entry* key(int position) const {
    return (const Entry*)(keys + offsets[position]);
  }
  template <class Entry>
  INLINE const Entry* value(int position) const {
    return (const Entry*)(values + offsets[position]);
  }
};

/// Asks for a tile's keys, or its values, while products of another are computed, some rows a step: pages are scattered,
/// and too short for the machine to foresee.
struct Foresight {
  const Places* places;  // null asks for nothing
  const char* base;
  int rows;

  static Foresight of(const Places* places, const char* base, int steps) {
    return {places, base, (TILE + steps - 1) / steps};
  }
  INLINE void at(int step) const {
    if (places == nullptr) return;
    const int end = std::min((step + 1) * rows, places->last);
    for (int key = std::max(step * rows, places->first); key < end; key++) {
      const char* row = base + places->offsets[key];
      for (int byte = 0; byte < places->row_bytes; byte += 64) isa::prefetch(row + byte);
    }
  }
};

/// Where the keys and values of one row and kv head lie, and which positions of them may be read: begin..end.
template <class Entry>
struct Pages {
  static constexpr bool SCALED = std::is_same_v<Entry, int8_t>;

  const Entry *keys, *values;
  const float *key_scales, *value_scales;
  const int32_t* pages;
  int64_t page_stride, slot_stride, scale_page_stride, scale_slot_stride;
  int page_size, head_dim, begin, end;

  /// The position at which the first tile begins.
  int first_tile() const { return begin / TILE * TILE; }

  void locate(int tile, Places& places) const {
    places.keys = (const char*)keys;
    places.values = (const char*)values;
    places.row_bytes = head_dim * (int)sizeof(Entry);
    places.first = std::max(begin - tile, 0);
    places.last = std::min(end - tile, TILE);
    each_run(tile, places, [&](int key, int64_t page, int slot, int some) {
      const int64_t offset = page * page_stride + slot * slot_stride;
      for (int i = 0; i < some; i++) places.offsets[key + i] = (offset + i * slot_stride) * (int64_t)sizeof(Entry);
      if constexpr (SCALED) {
        const int64_t scale = page * scale_page_stride + slot * scale_slot_stride;
        isa::prefetch(key_scales + scale);
        isa::prefetch(value_scales + scale);
      }
    });
  }

  /// Read a tile's scales; those of positions that may not be read are 0.
  template <class Words>
  void read_scales(int tile, const Places& places, Tile<Words>& packed) const {
    std::fill_n(packed.key_scales, TILE, 0.0f);
    std::fill_n(packed.value_scales, TILE, 0.0f);
    each_run(tile, places, [&](int key, int64_t page, int slot, int some) {
      const int64_t scale = page * scale_page_stride + slot * scale_slot_stride;
      for (int i = 0; i < some; i++) {
        packed.key_scales[key + i] = key_scales[scale + i * scale_slot_stride];
        packed.value_scales[key + i] = value_scales[scale + i * scale_slot_stride];
      }
    });
  }

 private:
  /// Call `run(key, page, slot, count)` for each run of a tile's positions that one page holds.
  template <class Run>
  INLINE void each_run(int tile, const Places& places, Run&& run) const {
    for (int key = places.first; key < places.last;) {
      const int slot = (tile + key) % page_size, some = std::min(page_size - slot, places.last - key);
      run(key, pages[(tile + key) / page_size], slot, some);
      key += some;
    }
  }
};

// --- transposition ---------------------------------------------------------------------------------------------------

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

/// One step of a transposition: swap the blocks of STEP lanes beside the diagonal of two rows.
template <int STEP, class Vector, int... LANE>
static INLINE void swap_blocks(Vector& a, Vector& b, std::integer_sequence<int, LANE...>) {
  const Vector upper = SHUFFLE(a, b, ((LANE & STEP) ? LANES + LANE - STEP : LANE)...);
  b = SHUFFLE(a, b, ((LANE & STEP) ? LANES + LANE : LANE + STEP)...);
  a = upper;
}
template <int STEP, class Vector>
static INLINE void transpose_step(Vector* rows) {
  UNROLL for (int row = 0; row < LANES; row++) {
    if (!(row & STEP)) swap_blocks<STEP>(rows[row], rows[row + STEP], std::make_integer_sequence<int, LANES>());
  }
}
/// Transpose LANES vectors in place.
template <class Vector>
static INLINE void transpose(Vector* rows) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
  if constexpr (LANES > 4) transpose_step<4>(rows);
  if constexpr (LANES > 8) transpose_step<8>(rows);
}

// --- packing ---------------------------------------------------------------------------------------------------------

/// Transpose LANES keys at a time, of which those in first..last are read.
template <class Words, class Entry>
static void pack_keys(typename Words::Word* target, const Places& places, int dim) {
  const int first = places.first, last = places.last;
  using Vector = typename Words::Vector;
  constexpr int FULL = LANES * Words::NUMBERS;
  const int total = words<Words>(dim);
  for (int from = first / LANES * LANES; from < last; from += LANES) {
    const bool whole = from >= first && from + LANES <= last;
    for (int word = 0; word < total; word += LANES) {
      Vector rows[LANES];
      const int begin = word * Words::NUMBERS, count = std::min(dim - begin, FULL);
      if (whole && count == FULL) {
        UNROLL for (int key = 0; key < LANES; key++) rows[key] = Words::row(places.key<Entry>(from + key) + begin, FULL);
      } else {
        UNROLL for (int key = 0; key < LANES; key++) {
          const bool holds = from + key >= first && from + key < last;
          rows[key] = holds ? Words::row(places.key<Entry>(from + key) + begin, count) : Vector{};
        }
      }
      transpose(rows);
      const int some = std::min(LANES, total - word);
      UNROLL for (int w = 0; w < LANES; w++) {
        if (w < some) Words::store(target + (word + w) * TILE + from, rows[w]);
      }
    }
  }
  // Vectors before the first key are multiplied as well: their scores are hidden, and must be numbers.
  for (int word = 0; word < total; word++) std::fill_n(target + word * TILE, first / LANES * LANES, 0);
}

template <class Entry>
static void pack_values(float* target, const Places& places, int dim) {
  const int first = places.first, last = places.last;
  const int width = padded(dim);
  std::fill_n(target, first * width, 0.0f);
  for (int key = first; key < last; key++) {
    for (int d = 0; d < dim; d += LANES) {
      isa::store(target + key * width + d, Floats::row(places.value<Entry>(key) + d, std::min(LANES, dim - d)));
    }
  }
}

#if ISA_AVX512 && defined(__AVX512BF16__)
/// Two keys' values side by side in a word, dimension by dimension.
template <class Entry>
static void pack_values(uint32_t* target, const Places& places, int dim) {
  const int first = places.first, last = places.last;
  alignas(64) int16_t order[64];  // 0, 32, 1, 33, ...: a number of the one, a number of the other
  for (int i = 0; i < 64; i++) order[i] = (int16_t)(i / 2 + i % 2 * 32);
  const __m512i lower = _mm512_load_si512(order), upper = _mm512_load_si512(order + 32);
  const int width = padded(dim);
  std::fill_n(target, first / 2 * width, 0u);
  for (int key = first / 2 * 2; key < last; key += 2) {
    uint32_t* words = target + key / 2 * width;
    for (int d = 0; d < dim; d += 32) {
      const int count = std::min(32, dim - d);
      const __m512i even = key >= first ? (__m512i)Pairs::row(places.value<Entry>(key) + d, count) : __m512i{};
      const __m512i odd = key + 1 < last ? (__m512i)Pairs::row(places.value<Entry>(key + 1) + d, count) : __m512i{};
      _mm512_storeu_si512(words + d, _mm512_permutex2var_epi16(even, lower, odd));
      if (width - d > 16) _mm512_storeu_si512(words + d + 16, _mm512_permutex2var_epi16(even, upper, odd));
    }
  }
}
#endif

/// Pack a tile: zeros before its first key, nothing behind its last.
template <class Words, class Entry>
static void pack(Tile<Words>& packed, const Places& places, int head_dim) {
  pack_keys<Words, Entry>(packed.keys, places, head_dim);
  pack_values<Entry>(packed.values, places, head_dim);
}

}  // namespace key_tiles
