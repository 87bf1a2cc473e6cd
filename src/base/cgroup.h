// Memory limits of control groups, versions 1 and 2: what a container may use.
#pragma once

#include <cstdint>
#include <string>

namespace kvanta {

// Bytes that the limits of a process's memory cgroup and of its ancestors leave; the largest int64 without a limit.
// `membership`: the process's /proc/PID/cgroup; `mount`: where the hierarchies are mounted.
int64_t CgroupAvailable(const std::string& membership = "/proc/self/cgroup",
                        const std::string& mount = "/sys/fs/cgroup");

}  // namespace kvanta
