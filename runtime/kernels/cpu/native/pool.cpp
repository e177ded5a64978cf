#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace qt {
namespace {

// How long an idle worker spins: longer than the host work between two decode steps.
constexpr int64_t SPIN_NS = 2000000;
// Iterations before a waiting thread starts to yield: about 10 us, far more than a barrier takes
// when every thread has a core.
constexpr int EAGER_SPINS = 256;
constexpr int SPINS_A_YIELD = 32;

// A cache line of its own for each flag, so that threads do not disturb one another.
struct alignas(64) Flag {
  std::atomic<uint32_t> value{0};
};

struct Pool {
  pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
  pthread_t handles[MAX_THREADS];
  int wanted = 1;   // threads asked for
  int running = 1;  // threads there are, the caller included
  bool fork_safe = false;

  PoolFn fn = nullptr;
  void* arg = nullptr;
  bool stopping = false;
  alignas(64) std::atomic<uint32_t> generation{0};
  alignas(64) std::atomic<int> sleeping{0};
  Flag done[MAX_THREADS];     // the last generation a worker finished
  Flag arrived[MAX_THREADS];  // barriers a thread has reached
};

Pool pool;

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t(1000000000) + time.tv_nsec;
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  return syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Spins until the condition holds; yields once it takes so long that a thread must be off its core.
template <class Condition>
void spin_until(Condition holds) {
  for (int i = 0; !holds(); i++) {
    pause_core();
    if (i >= EAGER_SPINS && i % SPINS_A_YIELD == 0) {
      sched_yield();
      i = EAGER_SPINS;
    }
  }
}

void wait_for_work(uint32_t seen) {
  const int64_t deadline = now_ns() + SPIN_NS;
  for (int i = 0; pool.generation.load(std::memory_order_acquire) == seen; i++) {
    pause_core();
    if (i < EAGER_SPINS || i % SPINS_A_YIELD) continue;
    sched_yield();
    i = EAGER_SPINS;
    if (now_ns() < deadline) continue;
    // Sequentially consistent with the store and load in pool_run: either we see the new
    // generation, or it sees a sleeper; and futex itself checks again.
    pool.sleeping.fetch_add(1);
    futex(pool.generation, FUTEX_WAIT, seen);
    pool.sleeping.fetch_sub(1);
  }
}

void* work(void* argument) {
  const int thread = int(reinterpret_cast<intptr_t>(argument));
  uint32_t seen = pool.done[thread].value.load(std::memory_order_relaxed);
  for (;;) {
    wait_for_work(seen);
    seen++;
    if (pool.stopping) return nullptr;
    pool.fn(thread, pool.running, pool.arg);
    pool.done[thread].value.store(seen, std::memory_order_release);
  }
}

void release_workers() {
  pool.generation.fetch_add(1);
  if (pool.sleeping.load() > 0) futex(pool.generation, FUTEX_WAKE, MAX_THREADS);
}

// The three of pthread_atfork. No region runs while memory is copied, so the child's copy is whole.
void before_fork() { pthread_mutex_lock(&pool.in_use); }

void after_fork_in_parent() { pthread_mutex_unlock(&pool.in_use); }

void after_fork_in_child() {
  pool.running = 1;
  pool.sleeping.store(0);
  pthread_mutex_init(&pool.in_use, nullptr);
}

void start_workers() {
  if (!pool.fork_safe) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    pool.fork_safe = true;
  }
  const uint32_t generation = pool.generation.load();
  for (Flag& flag : pool.arrived) flag.value.store(0);
  int running = 1;
  for (; running < pool.wanted; running++) {
    pool.done[running].value.store(generation);
    void* argument = reinterpret_cast<void*>(intptr_t(running));
    if (pthread_create(&pool.handles[running], nullptr, work, argument)) break;
  }
  // A system that refuses a thread is not asked again in every region.
  pool.wanted = pool.running = running;
}

void stop_workers() {
  if (pool.running == 1) return;
  pool.stopping = true;
  release_workers();
  for (int i = 1; i < pool.running; i++) pthread_join(pool.handles[i], nullptr);
  pool.stopping = false;
  pool.running = 1;
}

}  // namespace

void pool_run(PoolFn fn, void* arg) {
  pthread_mutex_lock(&pool.in_use);
  if (pool.running < pool.wanted) start_workers();
  if (pool.running > 1) {
    pool.fn = fn;
    pool.arg = arg;
    release_workers();
  }
  fn(0, pool.running, arg);
  const uint32_t generation = pool.generation.load(std::memory_order_relaxed);
  for (int i = 1; i < pool.running; i++)
    spin_until([&] { return pool.done[i].value.load(std::memory_order_acquire) == generation; });
  pthread_mutex_unlock(&pool.in_use);
}

void pool_barrier(int thread) {
  std::atomic<uint32_t>& mine = pool.arrived[thread].value;
  const uint32_t count = mine.load(std::memory_order_relaxed) + 1;
  mine.store(count, std::memory_order_release);
  for (int i = 0; i < pool.running; i++)
    // The difference, because counts wrap around; another thread may be one barrier ahead.
    spin_until([&] {
      return int32_t(pool.arrived[i].value.load(std::memory_order_acquire) - count) >= 0;
    });
}

}  // namespace qt

int qt_pool_start(int num_threads) {
  using qt::pool;
  num_threads = num_threads < 1 ? 1 : num_threads > qt::MAX_THREADS ? qt::MAX_THREADS : num_threads;
  pthread_mutex_lock(&pool.in_use);
  if (num_threads != pool.wanted) qt::stop_workers();
  pool.wanted = num_threads;
  pthread_mutex_unlock(&pool.in_use);
  return num_threads;
}

void qt_pool_stop() { qt_pool_start(1); }

int qt_pool_size() { return qt::pool.wanted; }
