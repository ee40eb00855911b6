// Types of numbers in memory, read as vectors of floats.
#pragma once

#include "isa.h"

namespace linear {

using isa::F;
using isa::I;
using isa::LANES;
using isa::U;

/// INT16 are INT8's numbers, where the machine multiplies pairs of them and no bytes: see `row_type`.
enum class Numbers : int32_t { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, INT16 = 4 };

/// LANES half floats, exactly: subnormal ones, infinities and NaN too.
static INLINE F load_fp16(const uint16_t* source) {
  isa::H value;
  memcpy(&value, source, sizeof value);
#if ISA_AVX512
  return (F)_mm512_cvtph_ps((__m256i)value);
#elif ISA_AVX2 && defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)value);
#else
  const U half = __builtin_convertvector(value, U), bits = half & 0x7fffu;
  const U bias = bits >= 0x7c00u ? isa::U{} + (224u << 23) : isa::U{} + (112u << 23);
  const F normal = (F)((bits << 13) + bias), tiny = isa::from_int((I)bits) * isa::set(5.9604644775390625e-8f);  // 2**-24
  return (F)((U)(bits < 0x400u ? tiny : normal) | (half & 0x8000u) << 16);
#endif
}

/// LANES numbers from the one at index `at` on.
static INLINE F load_numbers(const void* source, Numbers type, int64_t at) {
  if (type == Numbers::BF16) return isa::load((const bf16_t*)source + at);
  if (type == Numbers::FP16) return load_fp16((const uint16_t*)source + at);
  return isa::load((const float*)source + at);
}

}  // namespace linear
