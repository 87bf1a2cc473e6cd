#include "parallel/tcp_keepalive.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace kvanta::parallel {

std::vector<int> OpenFiles() {
  std::vector<int> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    files.push_back(std::atoi(entry.path().filename().c_str()));
  }
  return files;
}

void KeepNewConnectionsAlive(const std::vector<int>& before) {
  constexpr int kIdle = 10, kInterval = 5, kProbes = 3;                        // seconds, seconds, probes
  constexpr unsigned kUnacknowledged = (kIdle + kInterval * kProbes) * 1000U;  // milliseconds
  for (const int file : OpenFiles()) {
    if (std::ranges::find(before, file) != before.end()) continue;
    const auto set = [file](int level, int option, auto value) {
      return setsockopt(file, level, option, &value, sizeof value) == 0;
    };
    if (!set(SOL_SOCKET, SO_KEEPALIVE, 1)) continue;  // no socket
    set(IPPROTO_TCP, TCP_KEEPIDLE, kIdle);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kInterval);
    set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledged);
  }
}

}  // namespace kvanta::parallel
