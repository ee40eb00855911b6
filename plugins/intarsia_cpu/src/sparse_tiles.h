// 2:4 sparse weights, expanded in registers to the words that a dense panel has. All exact.
//
// A step holds four columns of a panel's outputs: the two numbers that each output keeps, then which they are.
//
//   INT8  48 pairs of bytes, and a half byte an output: bit c is set where column c is kept
//   BF16  48 pairs of bf16;  FP32  48 first numbers and 48 second ones; and for 16 outputs each
//         four times 16 bits: where column 0 is dropped, where column 1 is, ...
//
// Exactly two of four are kept, so every step has the same bytes and no pointer waits for a count of bits. Column 0 is the
// first number if it is kept, column 3 the second. The others need look no farther than these: column 1 is the second
// number if column 0 is kept, else the first; column 2 the first if column 3 is kept, else the second.
#pragma once

#include "isa.h"

namespace sparse {

using isa::F;
using isa::I;
using isa::LANES;
using isa::U;

constexpr int OUTS = 48;
constexpr int64_t MASK_BYTES = OUTS / 2;
constexpr int64_t INT8_BYTES = 2 * OUTS + MASK_BYTES, BF16_BYTES = 4 * OUTS + MASK_BYTES,
                  FP32_BYTES = 8 * OUTS + MASK_BYTES;

// --- masks: a bit a lane -----------------------------------------------------------------------------------------------

#if ISA_AVX512
using Mask = __mmask16;
static INLINE Mask mask_of(uint32_t bits) {
  return (Mask)bits;
}
/// `yes` in the lanes of the mask, else `no`.
static INLINE I choose(Mask mask, I yes, I no) {
  return (I)_mm512_mask_blend_epi32(mask, (__m512i)no, (__m512i)yes);
}
// The lanes of the mask shifted, or cut; the others as they are. One instruction each.
static INLINE I up16_where(Mask mask, I a) {
  return (I)_mm512_mask_slli_epi32((__m512i)a, mask, (__m512i)a, 16);
}
static INLINE I down16_where(Mask mask, I a) {
  return (I)_mm512_mask_srli_epi32((__m512i)a, mask, (__m512i)a, 16);
}
static INLINE I and_where(Mask mask, I a, int32_t bits) {
  return (I)_mm512_mask_and_epi32((__m512i)a, mask, (__m512i)a, _mm512_set1_epi32(bits));
}
#else
using Mask = I;
static INLINE Mask mask_of(uint32_t bits) {
  return (isa::set_int((int32_t)bits) & (isa::set_int(1) << isa::iota())) != 0;
}
static INLINE I choose(Mask mask, I yes, I no) {
  return mask ? yes : no;
}
static INLINE I up16_where(Mask mask, I a) {
  return mask ? a << 16 : a;
}
static INLINE I down16_where(Mask mask, I a) {
  return mask ? (I)((U)a >> 16) : a;
}
static INLINE I and_where(Mask mask, I a, int32_t bits) {
  return a & (~mask | bits);
}
#endif

/// Where a column is dropped by the outputs of vector `v`, from the masks of float weights.
static INLINE Mask dropped(const uint8_t* masks, int v, int column) {
  uint16_t bits;
  memcpy(&bits, masks + v * LANES / 16 * 8 + 2 * column, sizeof bits);
  return mask_of((uint32_t)bits >> (v * LANES % 16));
}

// --- words ---------------------------------------------------------------------------------------------------------------

/// Columns 0 and 1 (`half` 0) or 2 and 3 of vector `v`: a pair of bf16 a lane.
static INLINE I bf16_pairs(const uint8_t* step, int v, int half) {
  const I both = isa::load_int(step + 4 * v * LANES);
  const uint8_t* masks = step + 4 * OUTS;
  if (half == 0) return and_where(dropped(masks, v, 1), up16_where(dropped(masks, v, 0), both), 0xffff);
  return and_where(dropped(masks, v, 2), down16_where(dropped(masks, v, 3), both), (int32_t)0xffff0000);
}

/// One column of vector `v`.
static INLINE I fp32_column(const uint8_t* step, int v, int column) {
  const I first = isa::load_int(step + 4 * v * LANES), second = isa::load_int(step + 4 * (OUTS + v * LANES));
  const uint8_t* masks = step + 8 * OUTS;
  I value = column == 0 ? first : second;
  if (column == 1) value = choose(dropped(masks, v, 0), first, second);
  if (column == 2) value = choose(dropped(masks, v, 3), second, first);
  return choose(dropped(masks, v, column), I{}, value);
}

#if !(ISA_AVX512 && defined(__AVX512VBMI2__))
/// The half byte of each lane.
static INLINE I half_bytes(const uint8_t* masks, int v) {
  const uint8_t* from = masks + v * LANES / 2;
#if ISA_AVX512
  uint64_t word;
  memcpy(&word, from, sizeof word);
  const I halves = isa::first(8) ? isa::set_int((int32_t)word) : isa::set_int((int32_t)(word >> 32));
  return (I)((U)halves >> (U)(4 * (isa::iota() & 7))) & 15;
#else
  uint32_t word = 0;
  memcpy(&word, from, LANES / 2);
  return (I)((U)isa::set_int((int32_t)word) >> (U)(4 * isa::iota())) & 15;
#endif
}
#endif

/// Four columns of vector `v` in the bytes of a lane, + 128 as panels of int8 weights have them.
static INLINE I int8_word(const uint8_t* step, int v) {
  const I offset = isa::set_int((int32_t)0x80808080);
#if ISA_AVX512 && defined(__AVX512VBMI2__)
  uint64_t mask;
  memcpy(&mask, step + 2 * OUTS + 8 * v, sizeof mask);
  const __m256i pairs = _mm256_loadu_si256((const __m256i*)(step + 2 * v * LANES));
  return (I)_mm512_maskz_expand_epi8((__mmask64)mask, _mm512_castsi256_si512(pairs)) ^ offset;
#else
  isa::H pairs;
  memcpy(&pairs, step + 2 * v * LANES, sizeof pairs);
  const I both = (I)__builtin_convertvector(pairs, U), half = half_bytes(step + 2 * OUTS, v);
  const I low = (half & 1) != 0 ? both : both << 8, high = (half & 8) != 0 ? both : (I)((U)both >> 8);
  const I columns01 = ((half & 2) != 0 ? low : low & 0xff) & 0xffff;
  const I columns23 = (half & 4) != 0 ? high : high & 0xff00;
  return (columns01 | columns23 << 16) ^ offset;
#endif
}

}  // namespace sparse
