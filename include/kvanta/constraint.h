// Which tokens a request may take next: JSON, a regular expression, a grammar. The engine knows no such language; it
// asks a BitmaskFn once per step, for all constrained requests of the step together.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace kvanta {

// Where one request stands in its language: the filler's own object, for one request. It may be destroyed on any thread
// and while the engine is locked, so its destructor must not wait.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
};

struct MaskTask {
  TokenConstraint* constraint = nullptr;
  std::span<const int32_t> taken;  // tokens that the request has taken since the last call, in order
  // Out, zeros before: bit t % 32 of word t / 32 says that token t may come next. [ceil(vocab / 32)] words; the masks
  // of a call lie one behind the other. All zeros: nothing may follow, the request ends with kStop.
  std::span<uint32_t> mask;
  std::string error;  // out: not empty: the request ends with kError
};

// Called on the engine's thread before the step's tokens are chosen. What it throws ends these requests with kError.
using BitmaskFn = std::function<void(std::span<MaskTask> tasks)>;

}  // namespace kvanta
