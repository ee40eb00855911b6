// How keys and values lie in the cache: as floats, as bf16, or as int8 with a scale.
//
// A vector of int8 entries is one token's key, or value, of one head: number * scale stands for the float. The meaning is
// `intarsia.ops.int8_entries`, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"

namespace entries {

using isa::F;
using isa::I;
using isa::LANES;
using isa::U;

/// The type of a cache's numbers.
enum Entry : int32_t { FLOAT32 = 0, BF16 = 1, INT8 = 2 };

/// Bytes of a number.
static inline int64_t bytes(int32_t entry) {
  return entry == FLOAT32 ? 4 : entry == BF16 ? 2 : 1;
}

// --- int8 numbers as vectors; the counts are as those of `isa::load` and `isa::store` ---------------------------------

/// Bytes as floats. g++ would take a vector of bytes apart, number by number.
static INLINE F widen(isa::B numbers) {
#if ISA_AVX512
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)numbers));
#elif ISA_AVX2
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)numbers)));
#else
  return isa::from_int(__builtin_convertvector(numbers, I));
#endif
}
static INLINE F load(const int8_t* source, int count) {
  isa::B numbers = {};
  if (count >= LANES) {
    memcpy(&numbers, source, sizeof numbers);
    return widen(numbers);
  }
#if ISA_AVX512
  numbers = (isa::B)_mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), source);
#else
  memcpy(&numbers, source, (size_t)count);
#endif
  return widen(numbers);
}
static INLINE void store(int8_t* target, I value, int count) {
#if ISA_AVX512
  const isa::B numbers = (isa::B)_mm512_cvtepi32_epi8((__m512i)value);
#else
  const isa::B numbers = __builtin_convertvector(value, isa::B);
#endif
  memcpy(target, &numbers, (size_t)std::min(count, LANES));
}

// --- rounding --------------------------------------------------------------------------------------------------------

/// The largest of a vector's absolute values as bits, which are in the order of the numbers: a NaN's are the largest.
template <class Number>
static INLINE int32_t largest_bits(const Number* source, int64_t dim) {
  I largest = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const I bits = (I)isa::abs(isa::load(source + d, (int)std::min<int64_t>(LANES, dim - d)));
    largest = bits > largest ? bits : largest;
  }
  return isa::largest(largest);
}

/// Round a vector to int8 and return its scale: the largest absolute value / 127. Where that is not finite, the scale is
/// NaN and the numbers are 0.
template <class Number>
static float to_int8(const Number* source, int64_t dim, int8_t* target) {
  const int32_t bits = largest_bits(source, dim);
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  scale = bits < 0x7f800000 ? scale * (1.0f / 127) : NAN;
  const bool some = scale > 0;  // neither zeros, nor a vector that is not finite
  for (int64_t d = 0; d < dim; d += LANES) {
    const int count = (int)std::min<int64_t>(LANES, dim - d);
    I number = {};
    if (some) {
      // Scales of the smallest floats are rounded themselves, so that a quotient can pass 127.
      const F quotient = isa::load(source + d, count) / isa::set(scale);
      number = isa::to_int(isa::max(isa::set(-127.0f), isa::min(isa::set(127.0f), quotient)));
    }
    store(target + d, number, count);
  }
  return scale;
}

}  // namespace entries
