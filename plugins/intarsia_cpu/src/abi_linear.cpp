// The C ABI of linear layers. `linears.py` mirrors the structures.
#include <omp.h>

#include "linear.h"

#define API extern "C" __attribute__((visibility("default")))

using linear::Activations;
using linear::Linear;
using linear::Numbers;
using linear::Output;

/// Bytes of scratch that `intarsia_linear` needs for so many rows; 0 where the layer reads them as they are.
API int64_t intarsia_linear_scratch(const Linear* layer, int32_t is_bf16, int64_t num_rows) {
  const Numbers type = is_bf16 ? Numbers::BF16 : Numbers::FP32;
  return linear::reads_as_is(*layer, type) ? 0 : linear::activation_bytes(*layer, num_rows);
}

/// One linear layer over rows of floats or bf16, `stride` numbers apart. Scratch is aligned to 64 bytes, or null where the
/// layer reads the rows as they are.
API void intarsia_linear(const Linear* layer, const void* x, int32_t is_bf16, int64_t stride, int64_t num_rows,
                         void* scratch, const Output* out, int32_t num_threads) {
  Activations rows;
  if (scratch != nullptr) {
    rows = linear::lay_out(*layer, scratch, num_rows);
  } else {
    rows = {(uint8_t*)x, stride * (is_bf16 ? 2 : 4), nullptr, nullptr, nullptr, linear::num_groups(*layer)};
  }
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (scratch != nullptr) {
      if (is_bf16) {
        linear::prepare_part(*layer, rows, (const bf16_t*)x, stride, num_rows, thread, threads);
      } else {
        linear::prepare_part(*layer, rows, (const float*)x, stride, num_rows, thread, threads);
      }
#pragma omp barrier
    }
    linear::linear_part(*layer, rows, num_rows, *out, thread, threads);
  }
}
