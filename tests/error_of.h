// Message of the InputError that a call throws.
#pragma once

#include <string>

#include "kvanta/error.h"

namespace kvanta {

// "no error" if it throws none.
template <class F>
std::string ErrorOf(const F& f) {
  try {
    f();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace kvanta
