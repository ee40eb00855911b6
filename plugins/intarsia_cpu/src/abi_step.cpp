// The C ABI of the fused step. Pointers are to memory that the caller owns and that outlives the call.
#include "step_head.h"

#define API extern "C" __attribute__((visibility("default")))

/// Sizes of the structures, for the mirror in Python to be checked against.
API void intarsia_step_sizes(int64_t sizes[5]) {
  sizes[0] = sizeof(linear::Linear);
  sizes[1] = sizeof(StepLayer);
  sizes[2] = sizeof(StepModel);
  sizes[3] = sizeof(StepCache);
  sizes[4] = sizeof(StepBatch);
}

/// Bytes of work memory for `intarsia_step_run`, and for `intarsia_step_logits` and `_likeliest` of so many rows.
API int64_t intarsia_step_bytes(const StepModel* model, int64_t num_tokens, int64_t num_reads, int64_t num_threads) {
  return step::step_bytes(*model, num_tokens, num_reads, static_cast<int>(num_threads));
}
API int64_t intarsia_step_head_bytes(const StepModel* model, int64_t num_rows) {
  return step::head_bytes(*model, num_rows);
}

API int64_t intarsia_step_likeliest_bytes(const StepModel* model, int64_t num_rows, int64_t num_threads) {
  return step::likeliest_bytes(*model, num_rows, num_threads);
}

/// Run layers first..last of the model; `hidden` (T, E) fp32 is written from the ids, or taken up where there are none.
/// Rows that are not read are left as the layer before the last has them. Seconds by phase are added to `seconds`, if it
/// is not null.
API void intarsia_step_run(const StepModel* model, const StepBatch* batch, int64_t first, int64_t last, float* hidden,
                           void* memory, int64_t num_threads, double* seconds) {
  step::run(*model, *batch, first, last, hidden, static_cast<uint8_t*>(memory), static_cast<int>(num_threads), seconds);
}

/// Write fp32 logits (n, V) of the tokens at `rows` (n,) of the residual stream.
API void intarsia_step_logits(const StepModel* model, const float* hidden, const int64_t* rows, int64_t num_rows,
                              float* logits, void* memory, int64_t num_threads, double* seconds) {
  step::logits(*model, hidden, rows, num_rows, logits, static_cast<uint8_t*>(memory), static_cast<int>(num_threads),
               seconds);
}

/// Write the ids (n,) of those tokens' highest logits among the first `num_ids`, and these logits (n,). Of equal ones the
/// lowest id; -1 where the logit is NaN, as it is where any is, or infinite.
API void intarsia_step_likeliest(const StepModel* model, const float* hidden, const int64_t* rows, int64_t num_rows,
                                 int64_t num_ids, int64_t* ids, float* best, void* memory, int64_t num_threads,
                                 double* seconds) {
  step::likeliest(*model, hidden, rows, num_rows, num_ids, ids, best, static_cast<uint8_t*>(memory),
                  static_cast<int>(num_threads), seconds);
}
