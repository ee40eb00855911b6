// The plain C interface of attention.
#include <omp.h>

#include "attention.h"

#define API extern "C" __attribute__((visibility("default")))

/// For the caller to compare with its own idea of the structure.
API int64_t intarsia_attention_args_bytes() {
  return sizeof(AttentionArgs);
}

API void intarsia_attention(const AttentionArgs* args, int num_threads) {
  const attention::Rows rows = attention::bundle(*args);
#pragma omp parallel num_threads(num_threads)
  attention_part(*args, rows, omp_get_thread_num(), omp_get_num_threads());
}
