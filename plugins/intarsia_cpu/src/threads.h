// Shares of work and a barrier, for kernels that run inside one parallel region.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <sched.h>

struct Range {
  int64_t begin, end;
};

/// The part of 0..count that is this thread's: parts are even up to one, in order, and depend on nothing else.
static inline Range share(int64_t count, int thread, int num_threads) {
  return {count * thread / num_threads, count * (thread + 1) / num_threads};
}

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// A barrier that spins (Mellor-Crummey and Scott 1991, sense-reversing): some 100 ns where each thread has a core. Past
/// a bound of spins a thread lets others run, for machines with fewer cores than threads.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_threads) : num_threads_(num_threads), waiting_(num_threads) {}

  void wait() {
    if (num_threads_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (waiting_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      waiting_.store(num_threads_, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < kSpins) {
        relax();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 4000;
  const int num_threads_;
  alignas(64) std::atomic<int> waiting_;
  alignas(64) std::atomic<uint32_t> round_{0};
};
