// A small fork-join pool: one region at a time, workers spin briefly and then sleep. Results do not depend on the
// number of threads: work is split by index, and every reduction has a fixed order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace kvanta {

// Non-owning reference to a callable, so that a region costs no allocation.
class TaskRef {
 public:
  template <class F>
  TaskRef(F& f) noexcept  // NOLINT(google-explicit-constructor): a view, like string_view
      : object_(&f), call_([](void* object, int64_t task, int worker) { (*static_cast<F*>(object))(task, worker); }) {}
  void operator()(int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int);
};

class ThreadPool {
 public:
  // threads >= 1, the calling thread included; 0 = one per CPU of the process's affinity mask, at
  // most as many as the quota of its cgroup allows.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int Threads() const noexcept;

  // Calls fn(task, worker) for task in [0, tasks), worker in [0, Threads()); tasks are handed out dynamically in index
  // order. fn must not call ForEach. Returns when all are done; callers on several threads take turns. If fn throws,
  // tasks that have not begun are skipped, and the first exception is thrown here when the others are done.
  void ForEach(int64_t tasks, TaskRef fn);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta
