// Constrained decoding (JSON, regular expressions, grammars). The engine parses no grammar: once per step, a BitmaskFn
// computes the masks of the tokens that every constrained request of the step may take.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace kvanta {

// Grammar state of one request, an object of the BitmaskFn's. It may be destroyed on any thread and while the engine is
// locked, so its destructor must not wait.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
};

struct MaskTask {
  TokenConstraint* constraint = nullptr;
  std::span<const int32_t> taken;  // tokens sampled for the request since the last call, in order
  // Out, zeros before: bit t % 32 of word t / 32 allows token t. [ceil(vocab / 32)] words; the masks of a call are
  // contiguous. All zeros: no token may follow, the request ends with kStop.
  std::span<uint32_t> mask;
  std::string error;           // out: if not empty, the request ends with kError
  bool invalid_input = false;  // out: `error` is the request's own fault, such as a grammar that is too complex
};

// Called on the engine's thread before the step's tokens are sampled. An exception ends these requests with kError.
using BitmaskFn = std::function<void(std::span<MaskTask> tasks)>;

}  // namespace kvanta
