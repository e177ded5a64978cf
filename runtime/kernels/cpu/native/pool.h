// Threads that run one function together, with barriers inside it.
//
// A region is one call of pool_run: every thread calls fn(thread, num_threads, arg), the caller
// being thread 0, and pool_run returns when all have returned. Inside a region threads may meet at
// pool_barrier. Everything a thread wrote before the barrier or the end of the region is visible
// to the others after it.
//
// - One region at a time in a process: a second caller waits for the first. No nesting.
// - Workers spin for about 2 ms after a region, then sleep until the next one (waking costs 30 to
//   100 us). While they spin they give the core away to whoever wants it.
// - After fork the child has no workers; its first region starts them again.
// - The number of threads is what qt_pool_start was given, or fewer if the system refused some.
//   Before that, and after qt_pool_stop, regions run on the caller alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include <atomic>

#define QT_API extern "C" __attribute__((visibility("default")))

namespace qt {

constexpr int MAX_THREADS = 256;

using PoolFn = void (*)(int thread, int num_threads, void* arg);

void pool_run(PoolFn fn, void* arg);

// All threads of the region call it, with their own number; none returns before all have called.
void pool_barrier(int thread);

// pool_run for a callable body(thread, num_threads), such as a lambda.
template <class Body>
void pool_run(Body& body) {
  pool_run([](int thread, int num_threads, void* arg) {
    (*static_cast<Body*>(arg))(thread, num_threads);
  }, &body);
}

struct Range {
  int begin, end;
};

// A thread's part of `count` items: neighbouring, and even to within one.
inline Range share(int count, int thread, int num_threads) {
  return {int(int64_t(count) * thread / num_threads),
          int(int64_t(count) * (thread + 1) / num_threads)};
}

}  // namespace qt

// Use `num_threads` threads from the next region on, the caller included. Returns the number that
// will run, which is num_threads cut to 1..MAX_THREADS.
QT_API int qt_pool_start(int num_threads);
// End the workers and wait until they have ended.
QT_API void qt_pool_stop();
// Threads of the next region.
QT_API int qt_pool_size();
