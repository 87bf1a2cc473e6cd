#include "base/thread_pool.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/cgroup.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

constexpr int kMaxThreads = 1024;
// Iterations of `pause` before a thread sleeps: about 50 us, longer than the serial gaps inside one forward pass.
constexpr int kSpins = 3000;

// The gate is one word: generation of the region | stop | open | workers inside. A worker may enter only while the gate
// is open, so a region never waits for a worker that is still waking up.
constexpr uint64_t kInsideMask = 0xffff;
constexpr uint64_t kOpen = uint64_t{1} << 30;
constexpr uint64_t kStop = uint64_t{1} << 31;
constexpr int kGenerationShift = 32;

void Pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // as long as x86's pause; yield takes a cycle on most CPUs
#endif
}

int AffinityCpus() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1U, std::thread::hardware_concurrency());
}

// Threads beyond a cgroup's quota would be throttled, each while the others wait for it.
int AvailableCpus() {
  return static_cast<int>(std::min<int64_t>(AffinityCpus(), CgroupCpus()));
}

}  // namespace

struct ThreadPool::State {
  std::mutex one_region;
  std::vector<std::jthread> workers;
  int threads = 1;

  alignas(64) std::atomic<uint64_t> gate{0};
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) const TaskRef* task = nullptr;  // written only while the gate is closed and nobody is inside
  int64_t tasks = 0;
  std::atomic_flag failed;
  std::exception_ptr failure;  // the region's exception; written by the worker that sets `failed`

  void Drain(int worker) noexcept {
    try {
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        (*task)(i, worker);
      }
    } catch (...) {
      next.store(tasks, std::memory_order_relaxed);  // the rest is skipped
      if (!failed.test_and_set(std::memory_order_relaxed)) failure = std::current_exception();
    }
  }

  void Work(int worker) {
    uint64_t done = 0;  // generation this worker has already drained
    int spins = 0;
    for (;;) {
      uint64_t gate_now = gate.load(std::memory_order_acquire);
      if ((gate_now & kStop) != 0) return;
      const uint64_t generation = gate_now >> kGenerationShift;
      if ((gate_now & kOpen) != 0 && generation != done) {
        if (!gate.compare_exchange_weak(gate_now, gate_now + 1, std::memory_order_acq_rel)) continue;
        Drain(worker);
        gate.fetch_sub(1, std::memory_order_acq_rel);
        done = generation;
        spins = 0;
      } else if (++spins < kSpins) {
        Pause();
      } else {
        gate.wait(gate_now, std::memory_order_acquire);
        spins = 0;
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads < 0 || threads > kMaxThreads) {
    throw InputError(fmt::format("threads is {}; expected 1 to {}, or 0 for one per CPU", threads, kMaxThreads));
  }
  state_->threads = threads == 0 ? AvailableCpus() : threads;
  try {
    for (int worker = 1; worker < state_->threads; ++worker) {
      state_->workers.emplace_back([state = state_.get(), worker] { state->Work(worker); });
    }
  } catch (const std::system_error& error) {
    state_->gate.fetch_or(kStop);
    state_->gate.notify_all();
    throw ResourceError(fmt::format("cannot start {} threads: {}", state_->threads, error.what()));
  }
}

ThreadPool::~ThreadPool() {
  state_->gate.fetch_or(kStop, std::memory_order_acq_rel);
  state_->gate.notify_all();
  state_->workers.clear();  // joins
}

int ThreadPool::Threads() const noexcept {
  return state_->threads;
}

void ThreadPool::ForEach(int64_t tasks, TaskRef fn) {
  State& state = *state_;
  const std::scoped_lock lock(state.one_region);  // for one task, too: worker 0 is one caller's at a time
  if (state.threads == 1 || tasks <= 1) {
    for (int64_t i = 0; i < tasks; ++i) fn(i, 0);
    return;
  }
  state.task = &fn;
  state.tasks = tasks;
  state.next.store(0, std::memory_order_relaxed);
  const uint64_t generation = (state.gate.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
  state.gate.store((generation << kGenerationShift) | kOpen, std::memory_order_release);
  state.gate.notify_all();
  state.Drain(0);
  state.gate.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state.gate.load(std::memory_order_acquire) & kInsideMask) != 0; ++spins) {
    if (spins < kSpins) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (state.failure) {
    state.failed.clear(std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(state.failure, nullptr));
  }
}

}  // namespace kvanta
