// The plain C interface of the row ops: one parallel region each.
#include <omp.h>

#include "rows.h"

#define API extern "C" __attribute__((visibility("default")))

// `intarsia_<op>_bytes` is for the caller to compare with its own idea of the structure.
#define OP(name, Args)                                                \
  API int64_t intarsia_##name##_bytes() { return sizeof(Args); }      \
  API void intarsia_##name(const Args* args, int num_threads) {       \
    _Pragma("omp parallel num_threads(num_threads) if (num_threads > 1)") \
    name##_part(*args, omp_get_thread_num(), omp_get_num_threads());  \
  }

OP(norm, NormArgs)
OP(add_norm, AddNormArgs)
OP(rope, RopeArgs)
OP(activate, ActivateArgs)
OP(embedding, EmbeddingArgs)
OP(argmax, ArgmaxArgs)
OP(cache_write, CacheWriteArgs)
