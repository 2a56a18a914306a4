#include "pool.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define KT_PAUSE() _mm_pause()
#else
#define KT_PAUSE() std::this_thread::yield()
#endif

namespace kt {
namespace {

constexpr long kMaxTasks = (1L << 20) - 1;  // bits of the two counters in `state_`
constexpr int kSpins = 2000;                // about 0.1 ms of pauses before a worker sleeps

class Pool {
 public:
  int size() const { return threads_.load(std::memory_order_relaxed); }

  void resize(int n) {
    std::lock_guard<std::mutex> hold(busy_);
    threads_.store(std::max(1, n), std::memory_order_relaxed);
  }

  void run(TaskFn fn, void* context, long n) {
    std::unique_lock<std::mutex> hold(busy_, std::try_to_lock);
    if (!hold.owns_lock() || size() == 1 || n > kMaxTasks) {
      for (long i = 0; i < n; ++i) fn(context, i, 0);
      return;
    }
    start_workers();
    fn_.store(fn, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    epoch_ = (epoch_ + 1) & 0xffffffu;
    state_.store((uint64_t(epoch_) << 40) | (uint64_t(n) << 20), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) state_.notify_all();
    take_tasks(0);
    for (int spin = 0; done_.load(std::memory_order_acquire) != n; ++spin) {
      if (spin < kSpins)
        KT_PAUSE();
      else
        std::this_thread::yield();
    }
  }

 private:
  // The state word holds epoch (24 bits), n (20) and the next index (20). A task is claimed by
  // compare-and-swap on the whole word, so a worker that read an old job's fn can never run it:
  // the word has changed by then.
  void take_tasks(int thread) {
    for (;;) {
      uint64_t s = state_.load(std::memory_order_acquire);
      uint64_t next = s & 0xfffffu, n = (s >> 20) & 0xfffffu;
      if (next >= n) return;
      TaskFn fn = fn_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (!state_.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel)) continue;
      fn(context, long(next), thread);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void start_workers() {
    if (owner_ != getpid()) {  // first use, or a forked child: its parent's workers are not here
      owner_ = getpid();
      started_ = 1;
      sleepers_.store(0);
    }
    for (; started_ < size(); ++started_)
      std::thread([this, id = started_] { work(id); }).detach();
  }

  void work(int id) {
    uint64_t seen = state_.load(std::memory_order_acquire);
    for (;;) {
      if (id < size()) take_tasks(id);
      seen = state_.load(std::memory_order_acquire);
      int spin = 0;
      while (state_.load(std::memory_order_acquire) == seen && spin < kSpins) {
        KT_PAUSE();
        ++spin;
      }
      if (spin == kSpins) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        state_.wait(seen, std::memory_order_seq_cst);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
  }

  std::mutex busy_;
  std::atomic<int> threads_{1};
  std::atomic<int> sleepers_{0};
  std::atomic<TaskFn> fn_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<long> done_{0};
  std::atomic<uint64_t> state_{0};
  uint32_t epoch_ = 0;
  int started_ = 1;
  pid_t owner_ = 0;
};

// Never destroyed: detached workers may still look at it while the process exits.
Pool& pool() {
  static Pool* p = new Pool;
  return *p;
}

}  // namespace

int num_threads() { return pool().size(); }
void set_num_threads(int n) { pool().resize(n); }
void run_tasks(TaskFn fn, void* context, long n) { pool().run(fn, context, n); }

}  // namespace kt

extern "C" void kt_set_num_threads(int n) { kt::set_num_threads(n); }
extern "C" int kt_num_threads() { return kt::num_threads(); }

// One recorded call: an entry point and its argument block (see tape.py).
struct KtCall {
  void (*fn)(const void*);
  const void* args;
};
// A captured pass: every call in order, with no Python between them.
extern "C" void kt_replay(const KtCall* calls, long n) {
  for (long i = 0; i < n; ++i) calls[i].fn(calls[i].args);
}
