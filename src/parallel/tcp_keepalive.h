// TCP's keepalive on connections that a library has made.
#pragma once

#include <vector>

namespace kvanta::parallel {

// File descriptors of this process.
std::vector<int> OpenFiles();

// Lets TCP notice in 25 seconds that another machine is gone: it says nothing, and may be waited for. For the sockets
// that were not there `before`: Gloo does not give out its own.
void KeepNewConnectionsAlive(const std::vector<int>& before);

}  // namespace kvanta::parallel
