// Binds the fields of a struct from its own list (EngineConfig::VisitOptions, SamplingParams::VisitFields).
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

namespace kvanta::python {

template <class T>
struct FieldBinder {
  nanobind::class_<T>& type;

  template <class U, class... Limits>
  void operator()(const char* name, U T::*field, Limits...) const {
    type.def_rw(name, field);
  }
  template <class U, class... Limits>
  void operator()(const char* name, std::optional<U> T::*field, Limits...) const {
    type.def_rw(name, field, nanobind::arg().none());
  }
};

}  // namespace kvanta::python
