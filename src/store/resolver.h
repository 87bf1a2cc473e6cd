// Addresses of one host. The system's lookup has no deadline: it runs on a thread of its own, which is left behind.
#pragma once

#include <netdb.h>

#include <memory>
#include <string>

namespace kvanta::store {

// Linked by ai_next; at least one.
using Addresses = std::shared_ptr<const addrinfo>;

class Resolver {
 public:
  // Throws ConnectionError (socket.h). What is not found by the deadline is waited for by the next call with these
  // arguments, so that there is one thread however long a name server stays silent; what has failed until then is
  // looked up again.
  Addresses Resolve(const std::string& host, int port, double deadline);

 private:
  struct Lookup;
  std::shared_ptr<Lookup> pending_;
};

}  // namespace kvanta::store
