// Tiles of 64 keys and values, read from the pages of a cache and packed as attention's products read them: keys with a
// tile's keys side by side, values with a key's (or two keys') dimensions side by side. Of int8 entries the numbers are
// packed, which floats and bf16 hold exactly; their scales stand beside, for scores and weights to be multiplied by.
//
// Only slots that hold what a query of the block sees are read. The others are zeros: a weight of 0 would not hide NaN.
#pragma once

#include <algorithm>
#include <array>
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
  int first, last;
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

/// Asks for memory that will be read, some lines at a time, while other is worked on: pages are scattered, and too short
/// for the machine to foresee. Evenly, since what is asked for in a burst blocks what is read meanwhile.
class Foresight {
 public:
  /// Bytes that are not asked for yet.
  int64_t bytes() const { return bytes_; }
  bool is_over() const { return first_ == end_; }
  /// Whether there is room for a tile's slots.
  bool has_room() const { return end_ - first_ < MAX_RUNS / 2; }

  /// Foresee `bytes` from here on, behind all else. Past a bound, nothing.
  void add(const char* begin, int64_t bytes) {
    Run& last = at(end_ - 1);
    if (!is_over() && last.end == begin) {
      last.end += bytes;
    } else if (end_ - first_ < MAX_RUNS) {
      at(end_++) = {begin, begin + bytes};
    } else {
      return;
    }
    bytes_ += bytes;
  }

  /// Ask for so many lines; some more than a run has, where it ends.
  INLINE void ask(int lines) {
    if (is_over()) return;
    Run& run = at(first_);
    const char* line = run.begin;
    for (int i = 0; i < lines; i++) isa::prefetch(line + 64 * i);
    run.begin = line + 64 * lines;
    bytes_ -= 64 * lines;
    if (run.begin >= run.end) {
      bytes_ += run.begin - run.end;
      first_++;
    }
  }

 private:
  struct Run {
    const char *begin, *end;
  };
  static constexpr unsigned MAX_RUNS = 512;  // a power of two
  Run& at(unsigned index) { return runs_[index % MAX_RUNS]; }

  Run runs_[MAX_RUNS];
  unsigned first_ = 0, end_ = 0;  // of a ring
  int64_t bytes_ = 0;
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

  void locate(int tile, Places& places) const {
    places.keys = (const char*)keys;
    places.values = (const char*)values;
    places.first = first(tile);
    places.last = last(tile);
    each_run(tile, [&](int key, int64_t page, int slot, int some) {
      const int64_t offset = page * page_stride + slot * slot_stride;
      for (int i = 0; i < some; i++) places.offsets[key + i] = (offset + i * slot_stride) * (int64_t)sizeof(Entry);
    });
  }

  /// Foresee the tile of this kv head and of those behind it, `heads` in all, whose strides are given.
  void foresee(int tile, int heads, int64_t head_stride, int64_t scale_head_stride, Foresight& foresight) const {
    const int dense = slot_stride == head_dim ? TILE : 1;  // slots that lie end to end
    each_run(tile, [&](int, int64_t page, int slot, int some) {
      for (int head = 0; head < heads; head++) {
        for (int i = 0; i < some; i += dense) {
          const int64_t offset = head * head_stride + page * page_stride + (slot + i) * slot_stride;
          const int64_t bytes = std::min(some - i, dense) * head_dim * (int64_t)sizeof(Entry);
          foresight.add((const char*)(keys + offset), bytes);
          foresight.add((const char*)(values + offset), bytes);
        }
        if constexpr (SCALED) {
          const int64_t scale = head * scale_head_stride + page * scale_page_stride + slot * scale_slot_stride;
          isa::prefetch(key_scales + scale);
          isa::prefetch(value_scales + scale);
        }
      }
    });
  }

  /// Read a tile's scales; those of positions that may not be read are 0.
  template <class Words>
  void read_scales(int tile, Tile<Words>& packed) const {
    std::fill_n(packed.key_scales, TILE, 0.0f);
    std::fill_n(packed.value_scales, TILE, 0.0f);
    each_run(tile, [&](int key, int64_t page, int slot, int some) {
      const int64_t scale = page * scale_page_stride + slot * scale_slot_stride;
      for (int i = 0; i < some; i++) {
        packed.key_scales[key + i] = key_scales[scale + i * scale_slot_stride];
        packed.value_scales[key + i] = value_scales[scale + i * scale_slot_stride];
      }
    });
  }

 private:
  int first(int tile) const { return std::max(begin - tile, 0); }
  int last(int tile) const { return std::min(end - tile, TILE); }

  /// Call `run(key, page, slot, count)` for each run of a tile's positions that one page holds.
  template <class Run>
  INLINE void each_run(int tile, Run&& run) const {
    const int to = last(tile);
    for (int key = first(tile); key < to;) {
      const int slot = (tile + key) % page_size, some = std::min(page_size - slot, to - key);
      run(key, pages[(tile + key) / page_size], slot, some);
      key += some;
    }
  }
};

// --- transposition ---------------------------------------------------------------------------------------------------

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

/// Transpose LANES keys at a time. For those outside first..last stands another that may be read: their scores are hidden.
template <class Words, class Entry>
static void pack_keys(typename Words::Word* target, const Places& places, int dim, Foresight& foresight) {
  const int first = places.first, last = places.last;
  using Vector = typename Words::Vector;
  constexpr int FULL = LANES * Words::NUMBERS;
  const int total = words<Words>(dim);
  for (int from = first / LANES * LANES; from < last; from += LANES) {
    const Entry* keys[LANES];
    UNROLL for (int key = 0; key < LANES; key++) keys[key] = places.key<Entry>(std::clamp(from + key, first, last - 1));
    for (int word = 0; word < total; word += LANES) {
      Vector rows[LANES];
      const int begin = word * Words::NUMBERS, count = std::min(dim - begin, FULL);
      if (count == FULL) {
        UNROLL for (int key = 0; key < LANES; key++) rows[key] = Words::row(keys[key] + begin, FULL);
      } else {
        UNROLL for (int key = 0; key < LANES; key++) rows[key] = Words::row(keys[key] + begin, count);
      }
      transpose(rows);
      foresight.ask(8);
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
static void pack_values(float* target, const Places& places, int dim, Foresight& foresight) {
  const int first = places.first, last = places.last;
  const int width = padded(dim);
  std::fill_n(target, first * width, 0.0f);
  for (int key = first; key < last; key++) {
    foresight.ask(2);
    for (int d = 0; d < dim; d += LANES) {
      isa::store(target + key * width + d, Floats::row(places.value<Entry>(key) + d, std::min(LANES, dim - d)));
    }
  }
}

#if ISA_AVX512 && defined(__AVX512BF16__)
/// Two keys' values side by side in a word, dimension by dimension. For a key that there is not, zeros.
template <class Entry>
static INLINE void pack_pair(uint32_t* target, const Entry* even, const Entry* odd, int dim) {
  alignas(64) static constexpr auto ORDER = [] {  // 0, 32, 1, 33, ...: a number of the one, a number of the other
    std::array<int16_t, 64> order{};
    for (int i = 0; i < 64; i++) order[(size_t)i] = (int16_t)(i / 2 + i % 2 * 32);
    return order;
  }();
  const __m512i lower = _mm512_load_si512(&ORDER[0]), upper = _mm512_load_si512(&ORDER[32]);
  const int width = padded(dim);
  for (int d = 0; d < dim; d += 32) {
    const int count = std::min(32, dim - d);
    const __m512i first = even ? (__m512i)Pairs::row(even + d, count) : __m512i{};
    const __m512i second = odd ? (__m512i)Pairs::row(odd + d, count) : __m512i{};
    _mm512_storeu_si512(target + d, _mm512_permutex2var_epi16(first, lower, second));
    if (width - d > 16) _mm512_storeu_si512(target + d + 16, _mm512_permutex2var_epi16(first, upper, second));
  }
}

template <class Entry>
static void pack_values(uint32_t* target, const Places& places, int dim, Foresight& foresight) {
  const int first = places.first, last = places.last, width = padded(dim);
  std::fill_n(target, first / 2 * width, 0u);
  const auto pair = [&](int key, const Entry* even, const Entry* odd) {
    foresight.ask(2);
    pack_pair(target + key / 2 * width, even, odd, dim);
  };
  int key = first;
  if (key % 2) pair(key, nullptr, places.value<Entry>(key)), key++;
  if (dim == 64) {  // as most models have it: a loop for the compiler to unroll
    for (; key + 1 < last; key += 2) {
      foresight.ask(2);
      pack_pair(target + key / 2 * 64, places.value<Entry>(key), places.value<Entry>(key + 1), 64);
    }
  } else {
    for (; key + 1 < last; key += 2) pair(key, places.value<Entry>(key), places.value<Entry>(key + 1));
  }
  if (key < last) pair(key, places.value<Entry>(key), nullptr);
}
#endif

/// Pack a tile: zeros before its first key, nothing behind its last.
template <class Words, class Entry>
static void pack(Tile<Words>& packed, const Places& places, int head_dim, Foresight& foresight) {
  pack_keys<Words, Entry>(packed.keys, places, head_dim, foresight);
  pack_values<Entry>(packed.values, places, head_dim, foresight);
}

}  // namespace key_tiles
