// parallel_for on a small pool of our own.
//
// Tasks are taken one by one from a shared counter, by the caller too: a worker the system has
// put aside delays nobody, a forked child (which has no workers) still finishes alone, and a
// second thread that calls while the pool is busy just does its work itself. Which thread does a
// task never changes a result: tasks write disjoint outputs.
#pragma once
#include <type_traits>

namespace kt {

using TaskFn = void (*)(void* context, long index, int thread);

int num_threads();
void set_num_threads(int n);
// Runs fn(context, i, thread) for i in [0, n), thread in [0, num_threads()).
void run_tasks(TaskFn fn, void* context, long n);

template <class F>
inline void parallel_for(long n, F&& body) {
  using Body = typename std::remove_reference<F>::type;
  if (n == 1) {
    body(0L, 0);
    return;
  }
  run_tasks([](void* c, long i, int t) { (*static_cast<Body*>(c))(i, t); }, (void*)&body, n);
}

}  // namespace kt
