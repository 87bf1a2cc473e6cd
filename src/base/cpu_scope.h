// CPUs that a thread may run on.
#pragma once

#include <sched.h>

namespace kvanta {

// The calling thread's, when it was made.
class CpuSet {
 public:
  CpuSet() noexcept { known_ = sched_getaffinity(0, sizeof(set_), &set_) == 0; }
  // Moves the calling thread to these CPUs.
  void Apply() const noexcept {
    if (known_) sched_setaffinity(0, sizeof(set_), &set_);
  }

 private:
  cpu_set_t set_;
  bool known_;  // false on machines with more CPUs than cpu_set_t has
};

// Keeps the calling thread on some CPUs for a while.
class CpuScope {
 public:
  explicit CpuScope(const CpuSet& cpus) noexcept { cpus.Apply(); }
  ~CpuScope() { before_.Apply(); }
  CpuScope(const CpuScope&) = delete;
  CpuScope& operator=(const CpuScope&) = delete;

 private:
  CpuSet before_;
};

}  // namespace kvanta
