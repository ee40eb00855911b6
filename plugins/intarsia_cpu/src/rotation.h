// Rotation of a row in blocks of 64 by the Hadamard matrix of that order, over its norm: `intarsia.quantizing.rotated`.
#pragma once

#include "isa.h"

namespace rotation {

using isa::F;
using isa::I;
using isa::LANES;

constexpr int BLOCK = 64;

/// Add lanes that lie STEP apart, and subtract them: (a, b) becomes (a + b, a - b).
template <int STEP>
static INLINE F within(F value) {
  const I is_second = (isa::iota() & STEP) != 0;
  const F other = isa::swap_lanes<STEP>(value);
  return other + isa::select(is_second, -value, value);
}

/// Rotate a block by the fast Walsh-Hadamard transform; `read(i)` gives its numbers from i on, a vector of them.
template <class Read>
static INLINE void block(Read&& read, float* target) {
  constexpr int COUNT = BLOCK / LANES;
  F values[COUNT];
  UNROLL for (int i = 0; i < COUNT; i++) {
    F value = read(i * LANES) * isa::set(0.125f);  // one over the matrix's norm
    value = within<1>(value);
    value = within<2>(value);
    if constexpr (LANES > 4) value = within<4>(value);
    if constexpr (LANES > 8) value = within<8>(value);
    values[i] = value;
  }
  UNROLL for (int step = 1; step < COUNT; step *= 2) {
    UNROLL for (int i = 0; i < COUNT; i++) {
      if (i & step) continue;
      const F first = values[i], second = values[i + step];
      values[i] = first + second;
      values[i + step] = first - second;
    }
  }
  UNROLL for (int i = 0; i < COUNT; i++) isa::store(target + i * LANES, values[i]);
}

}  // namespace rotation
