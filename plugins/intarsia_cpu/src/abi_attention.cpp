// Attention: a thread's share, and the C ABI.
#include <omp.h>

#include "attention.h"

void attention_part(const AttentionArgs& args, const attention::Schedule& schedule, int thread) {
  using namespace attention;
  using key_tiles::Halves;
  with_entry(args, [&](auto entry) {
    using Entry = decltype(entry);
    constexpr bool widens = std::is_same_v<Entry, float>;  // queries of bf16 meet floats as floats
    Scout scout(args, schedule, thread);
    scout.next();  // the first tile is read at once
    Foresight foresight;
    for (int i = 0; i < schedule.num_jobs(thread); i++) {
      const Job job = schedule.job(args, thread, i);
      if (args.queries_bf16) {
        run<std::conditional_t<widens, Floats, Halves>, bf16_t, Entry>(job, scout, foresight);
      } else {
        run<Floats, float, Entry>(job, scout, foresight);
      }
    }
  });
}

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
