// The vector layer: one name for each operation, over the paths that the compiler's target macros choose.
//
//   AVX-512 with BF16 and VNNI | AVX-512 (VNNI or not) | AVX2 with FMA (AVX-VNNI or not) | portable
//
// Portable code is GCC's vector extension, which becomes NEON on aarch64 and SSE2 on old x86. A kernel is written once
// against these names, with `LANES` floats a vector. Tails use the operations that take a count: the same arithmetic on
// the same lanes, the others zero, so that no number depends on where a tail begins.
//
// Build with -ffp-contract=off: a fused multiply-add happens where `fma` stands and nowhere else.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda
#define UNROLL _Pragma("GCC unroll 64")

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ISA_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define ISA_AVX2 1
#else
#define ISA_PORTABLE 1
#endif
// g++ moves loads and broadcasts about and then spills half of 24 accumulators. Volatile assembly keeps the order of
// the source, in which they fit.
#if ISA_AVX512 && defined(__GNUC__) && !defined(__clang__)
#define ISA_ORDERED 1
#endif

// x86 without dot products of bytes has them of pairs of 16 bits.
#if (ISA_AVX512 && !defined(__AVX512VNNI__)) || (ISA_AVX2 && !defined(__AVXVNNI__))
#define ISA_INT16_DOTS 1
#endif

using bf16_t = uint16_t;  // the upper half of a float

namespace isa {

#if ISA_AVX512
constexpr int LANES = 16;
#elif ISA_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if ISA_INT16_DOTS
constexpr bool HAS_INT16_DOTS = true;
#else
constexpr bool HAS_INT16_DOTS = false;
#endif

// Vectors of LANES numbers. Operators work lane by lane; comparisons give an I of 0 and -1, which `?:` takes.
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef int8_t B __attribute__((vector_size(LANES)));
typedef uint8_t UB __attribute__((vector_size(LANES)));

// --- constants, loads and stores -------------------------------------------------------------------------------------

static INLINE F set(float value) {
  return value - F{};  // x - 0 is x, minus zero included, so this costs nothing
}
static INLINE I set_int(int32_t value) {
  return I{} + value;
}
static INLINE F zero() {
  return F{};
}
static INLINE F as_float(I bits) {
  return (F)bits;
}
static INLINE I as_int(F value) {
  return (I)value;
}
/// 0, 1, 2, ... LANES - 1.
static INLINE I iota() {
  I result = {};
  UNROLL for (int lane = 0; lane < LANES; lane++) result[lane] = lane;
  return result;
}
/// -1 in the first `count` lanes (count may be negative or above LANES), 0 in the others.
static INLINE I first(int count) {
  return iota() < set_int(count);
}

// No address need be aligned.
static INLINE F load(const float* source) {
  F value;
  memcpy(&value, source, sizeof value);
  return value;
}
static INLINE I load_int(const void* source) {
  I value;
  memcpy(&value, source, sizeof value);
  return value;
}
static INLINE void store(float* target, F value) {
  memcpy(target, &value, sizeof value);
}
static INLINE void store_int(void* target, I value) {
  memcpy(target, &value, sizeof value);
}
/// The first `count` (0 to LANES) numbers; the other lanes are 0 and their memory is not read.
static INLINE F load(const float* source, int count) {
#if ISA_AVX512
  return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), source);
#elif ISA_AVX2
  return (F)_mm256_maskload_ps(source, (__m256i)first(count));
#else
  F value = {};
  memcpy(&value, source, sizeof(float) * (size_t)count);
  return value;
#endif
}
static INLINE void store(float* target, F value, int count) {
#if ISA_AVX512
  _mm512_mask_storeu_ps(target, (__mmask16)((1u << count) - 1), (__m512)value);
#elif ISA_AVX2
  _mm256_maskstore_ps(target, (__m256i)first(count), (__m256)value);
#else
  memcpy(target, &value, sizeof(float) * (size_t)count);
#endif
}

// --- lanes -----------------------------------------------------------------------------------------------------------

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, isa::I{__VA_ARGS__})
#endif

template <int STEP, int... LANE>
static INLINE F swap_lanes(F value, std::integer_sequence<int, LANE...>) {
  return SHUFFLE(value, value, (LANE ^ STEP)...);
}
/// Swap each lane with that STEP from it, a power of two.
template <int STEP>
static INLINE F swap_lanes(F value) {
  return swap_lanes<STEP>(value, std::make_integer_sequence<int, LANES>());
}

// --- bf16 ------------------------------------------------------------------------------------------------------------

static INLINE float to_float(bf16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}
static INLINE F widen(H value) {
  return (F)(__builtin_convertvector(value, U) << 16);
}
static INLINE F load(const bf16_t* source) {
  H value;
  memcpy(&value, source, sizeof value);
  return widen(value);
}
static INLINE F load(const bf16_t* source, int count) {
#if ISA_AVX512
  return widen((H)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), source));
#else
  H value = {};
  memcpy(&value, source, sizeof(bf16_t) * (size_t)count);
  return widen(value);
#endif
}
/// Round to the nearest bf16, ties to even; NaN stays NaN. One way of rounding for every path but AVX-512 BF16, whose
/// instruction agrees but for subnormal numbers, which it makes 0.
static INLINE H narrow(F value) {
#if ISA_AVX512 && defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)value);
#else
  const U bits = (U)value;
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(value == value ? rounded : quiet, H);
#endif
}
static INLINE void store(bf16_t* target, F value) {
  const H half = narrow(value);
  memcpy(target, &half, sizeof half);
}
static INLINE void store(bf16_t* target, F value, int count) {
  const H half = narrow(value);
  memcpy(target, &half, sizeof(bf16_t) * (size_t)count);
}
/// The bf16 nearest to one float, rounded as vectors are.
static INLINE bf16_t to_bf16(float value) {
  return (bf16_t)narrow(set(value))[0];
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

/// a * b + c, rounded once where the machine can.
static INLINE F fma(F a, F b, F c) {
#if ISA_AVX512
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ISA_AVX2
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
/// The larger; b where either is NaN.
static INLINE F max(F a, F b) {
#if ISA_AVX512
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif ISA_AVX2
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
/// The smaller; b where either is NaN.
static INLINE F min(F a, F b) {
#if ISA_AVX512
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif ISA_AVX2
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
static INLINE F abs(F a) {
  return (F)((U)a & 0x7fffffffu);
}
static INLINE F select(I mask, F yes, F no) {
  return mask ? yes : no;
}
/// Whether any lane of a mask is set.
static INLINE bool any(I mask) {
#if ISA_AVX512
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
  bool found = false;
  for (int lane = 0; lane < LANES; lane++) found |= mask[lane] != 0;
  return found;
#endif
}
/// Whether the first `count` lanes are equal numbers.
static INLINE bool same(F a, F b, int count) {
#if ISA_AVX512
  return (_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NEQ_UQ) & ((1u << count) - 1)) == 0;
#else
  bool equal = true;
  for (int lane = 0; lane < count; lane++) equal &= a[lane] == b[lane];
  return equal;
#endif
}
/// The nearest whole number, ties to even, for |a| < 2**22.
static INLINE F round(F a) {
#if ISA_AVX512
  return (F)_mm512_roundscale_ps((__m512)a, 0);
#elif ISA_AVX2
  return (F)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const F shift = set(12582912.0f);  // 1.5 * 2**23: its last bit is worth 1
  return (a + shift) - shift;
#endif
}
/// The largest whole number that is not above a, for |a| < 2**22.
static INLINE F floor(F a) {
#if ISA_AVX512
  return (F)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif ISA_AVX2
  return (F)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const F nearest = round(a);
  return nearest > a ? nearest - set(1.0f) : nearest;
#endif
}
/// The nearest int, ties to even, for |a| < 2**22.
static INLINE I to_int(F a) {
#if ISA_AVX512
  return (I)_mm512_cvtps_epi32((__m512)a);
#elif ISA_AVX2
  return (I)_mm256_cvtps_epi32((__m256)a);
#else
  return __builtin_convertvector(round(a), I);
#endif
}
static INLINE F from_int(I a) {
  return __builtin_convertvector(a, F);
}
static INLINE F sqrt(F a) {
#if ISA_AVX512
  return (F)_mm512_sqrt_ps((__m512)a);
#elif ISA_AVX2
  return (F)_mm256_sqrt_ps((__m256)a);
#else
  UNROLL for (int lane = 0; lane < LANES; lane++) a[lane] = sqrtf(a[lane]);
  return a;
#endif
}
/// 1 / a to 7e-5 relative or better; 0 for infinity.
static INLINE F rough_reciprocal(F a) {
#if ISA_AVX512
  return (F)_mm512_rcp14_ps((__m512)a);
#else
  return set(1.0f) / a;
#endif
}
/// a * 2**n for whole n; overflows to infinity and underflows to 0 (through subnormal numbers or not).
static INLINE F scale(F a, F n) {
#if ISA_AVX512
  return (F)_mm512_scalef_ps((__m512)a, (__m512)n);
#else
  // In two steps, since n reaches beyond the exponents of one float.
  n = max(set(-250.0f), min(set(250.0f), n));
  const I whole = to_int(n), half = whole >> 1, rest = whole - half;
  return a * (F)((half + 127) << 23) * (F)((rest + 127) << 23);
#endif
}

/// a - floor(a).
static INLINE F fraction(F a) {
#if ISA_AVX512
  return (F)_mm512_reduce_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  return a - floor(a);
#endif
}
/// a * 2**floor(n), as `scale` does.
static INLINE F scale_floor(F a, F n) {
#if ISA_AVX512
  return (F)_mm512_scalef_ps((__m512)a, (__m512)n);  // which takes the floor itself
#else
  return scale(a, floor(n));
#endif
}

// Reductions: one order of additions a path.
static INLINE float sum(F a) {
#if ISA_AVX512
  return _mm512_reduce_add_ps((__m512)a);
#else
  UNROLL for (int width = LANES / 2; width > 0; width /= 2) {
    UNROLL for (int lane = 0; lane < width; lane++) a[lane] = a[lane] + a[lane + width];
  }
  return a[0];
#endif
}
static INLINE int32_t sum(I a) {
#if ISA_AVX512
  return _mm512_reduce_add_epi32((__m512i)a);
#else
  UNROLL for (int width = LANES / 2; width > 0; width /= 2) {
    UNROLL for (int lane = 0; lane < width; lane++) a[lane] = a[lane] + a[lane + width];
  }
  return a[0];
#endif
}
/// The largest lane, for numbers without NaN.
static INLINE float largest(F a) {
#if ISA_AVX512
  return _mm512_reduce_max_ps((__m512)a);
#else
  UNROLL for (int width = LANES / 2; width > 0; width /= 2) {
    UNROLL for (int lane = 0; lane < width; lane++) a[lane] = a[lane] > a[lane + width] ? a[lane] : a[lane + width];
  }
  return a[0];
#endif
}

/// The largest lane.
static INLINE int32_t largest(I a) {
#if ISA_AVX512
  return _mm512_reduce_max_epi32((__m512i)a);
#else
  UNROLL for (int width = LANES / 2; width > 0; width /= 2) {
    UNROLL for (int lane = 0; lane < width; lane++) a[lane] = a[lane] > a[lane + width] ? a[lane] : a[lane + width];
  }
  return a[0];
#endif
}

// --- int8 ------------------------------------------------------------------------------------------------------------

static INLINE void store_narrow(int8_t* target, I value) {
  const B bytes = __builtin_convertvector(value, B);
  memcpy(target, &bytes, sizeof bytes);
}
static INLINE void store_narrow(int16_t* target, I value) {
  const H halves = __builtin_convertvector(value, H);
  memcpy(target, &halves, sizeof halves);
}
/// Unsigned bytes as ints.
static INLINE I load_uint8_int(const uint8_t* source) {
  UB bytes;
  memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, I);
}

// --- dot products: acc += ..., in the order of the source -------------------------------------------------------------

/// Four bytes in every lane.
static INLINE I broadcast4(const void* source) {
#if ISA_ORDERED
  I value;
  asm volatile("vpbroadcastd %1, %0" : "=v"(value) : "m"(*(const int32_t*)source));
  return value;
#else
  int32_t word;
  memcpy(&word, source, sizeof word);
  return set_int(word);
#endif
}
/// acc += a * b, fused as `fma` is.
static INLINE void fma_into(F& acc, F a, F b) {
#if ISA_ORDERED
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  acc = fma(a, b, acc);
#endif
}
/// acc += a0 * b0 + a1 * b1, where a lane holds two bf16: the lower half is the first.
static INLINE void dot2_into(F& acc, I a, I b) {
#if ISA_ORDERED && defined(__AVX512BF16__)
  asm volatile("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#elif ISA_AVX512 && defined(__AVX512BF16__)
  acc = (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  const I upper = set_int((int32_t)0xffff0000u);
  acc = fma((F)(a << 16), (F)(b << 16), acc);
  acc = fma((F)(a & upper), (F)(b & upper), acc);
#endif
}
/// acc += a0 * b0 + ... + a3 * b3, exact: a lane of `a` holds four unsigned bytes, one of `b` four signed ones.
static INLINE void dot4_into(I& acc, I a, I b) {
#if ISA_ORDERED && defined(__AVX512VNNI__)
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#elif ISA_AVX512 && defined(__AVX512VNNI__)
  acc = (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif ISA_AVX512
  // Sums of two products in 16 bits would saturate: even and odd bytes are widened to 16 bits first.
  const __m512i even_a = _mm512_and_si512((__m512i)a, _mm512_set1_epi16(255)), odd_a = _mm512_srli_epi16((__m512i)a, 8);
  const __m512i even_b = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8), odd_b = _mm512_srai_epi16((__m512i)b, 8);
  acc += (I)_mm512_madd_epi16(even_a, even_b) + (I)_mm512_madd_epi16(odd_a, odd_b);
#elif ISA_AVX2 && defined(__AVXVNNI__)
  acc = (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif ISA_AVX2
  const __m256i even_a = _mm256_and_si256((__m256i)a, _mm256_set1_epi16(255)), odd_a = _mm256_srli_epi16((__m256i)a, 8);
  const __m256i even_b = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8), odd_b = _mm256_srai_epi16((__m256i)b, 8);
  acc += (I)_mm256_madd_epi16(even_a, even_b) + (I)_mm256_madd_epi16(odd_a, odd_b);
#else
  UNROLL for (int byte = 0; byte < 4; byte++) {
    acc += (I)(((U)a >> (8 * byte)) & 255u) * (((I)((U)b << (24 - 8 * byte))) >> 24);
  }
#endif
}

/// The same where `a` holds at most 15 a byte, so that sums of two products fit 16 bits.
static INLINE void dot4_nibbles_into(I& acc, I a, I b) {
#if ISA_INT16_DOTS && ISA_AVX512
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
  acc += (I)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif ISA_INT16_DOTS
  acc += (I)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)b), _mm256_set1_epi16(1));
#else
  dot4_into(acc, a, b);
#endif
}
#if ISA_INT16_DOTS
/// acc += a0 * b0 + a1 * b1, exact: a lane holds two numbers of 16 bits.
static INLINE void dot_pairs_into(I& acc, I a, I b) {
#if ISA_AVX512
  acc += (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  acc += (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
/// The first two unsigned bytes of every lane (of the second two, where HALF is 1) as numbers of 16 bits.
template <int HALF>
static INLINE I widen_bytes(I a) {
  // The bytes to take from each four; of bit 7, zero.
  const __m128i lane = _mm_setr_epi32(0x80018000, 0x80058004, 0x80098008, (int)0x800d800c);
  const __m128i from = _mm_add_epi8(lane, _mm_set1_epi16(2 * HALF));
#if ISA_AVX512
  return (I)_mm512_shuffle_epi8((__m512i)a, _mm512_broadcast_i32x4(from));
#else
  return (I)_mm256_shuffle_epi8((__m256i)a, _mm256_broadcastsi128_si256(from));
#endif
}
#endif

/// What was read from memory before is not kept in registers: it is read where it is asked for again.
static INLINE void read_again() {
  asm volatile("" ::: "memory");
}

/// Ask for the cache line at this address to be brought into L2; any address will do.
static INLINE void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 2);
}
/// The same for a line that is read once: it takes nobody's place in the caches behind the first.
static INLINE void prefetch_once(const void* address) {
  __builtin_prefetch(address, 0, 0);
}

}  // namespace isa
