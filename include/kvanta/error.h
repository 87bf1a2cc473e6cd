// Errors that Kvanta throws. The library never prints and never aborts: it throws one of these, or returns.
#pragma once

#include <stdexcept>
#include <string>

namespace kvanta {

// Base of every error. `what()` is one line: the thing, the value, the alternatives.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's input is wrong: a name, a file, a prompt, a shape. Python: kvanta.InputError (a ValueError); CLI:
// exit 2.
class InputError : public Error {
 public:
  // field: name of the request's field that is wrong, a literal; empty if no field is.
  explicit InputError(const std::string& what, const char* field = "") : Error(what), field_(field) {}

  const char* Field() const noexcept { return field_; }

 private:
  const char* field_;
};

// The input is valid but a resource (memory, threads, file system) is insufficient. Python: kvanta.ResourceError
// (a ValueError too, with the figures); CLI: exit 1.
class ResourceError : public Error {
 public:
  using Error::Error;
};

// The engine's queue is full: nothing was queued, the same request may succeed later. Python: kvanta.QueueFullError (a
// ResourceError); a server answers 429 or 503.
class QueueFullError : public ResourceError {
 public:
  using ResourceError::ResourceError;
};

}  // namespace kvanta
