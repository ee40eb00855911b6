// The plain C interface of attention.
#include <omp.h>

#include "attention.h"

#define API extern "C" __attribute__((visibility("default")))

/// For the caller to compare with its own idea of the structure.
API int64_t intarsia_attention_args_bytes() {
  return sizeof(AttentionArgs);
}

API void intarsia_attention(const AttentionArgs* args, int num_threads) {
  std::optional<attention::Schedule> schedule;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    schedule.emplace(*args, omp_get_num_threads());  // which can be fewer than were asked for
    attention_part(*args, *schedule, omp_get_thread_num());
  }
}
