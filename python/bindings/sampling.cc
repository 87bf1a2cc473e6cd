#include "kvanta/sampling.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "fields.h"
#include "kv_cache_event.h"
#include "kvanta/pooling.h"

namespace nb = nanobind;

namespace kvanta::python {

using nb::literals::operator""_a;

void BindSampling(nb::module_& module) {
  nb::class_<SamplingParams> params(module, "SamplingParams", "The engine's part of kvanta.SamplingParams.");
  params.def(nb::init<>());
  params.def("validate", &SamplingParams::Validate, "vocab"_a, "Raises InputError, as Engine.add does.");
  SamplingParams::VisitFields(FieldBinder<SamplingParams>{params});
  nb::enum_<PoolingType>(module, "PoolingType").value("MEAN", PoolingType::kMean).value("LAST", PoolingType::kLast);
  nb::class_<PoolingParams> pooling(module, "PoolingParams", "The engine's part of kvanta.PoolingParams.");
  pooling.def(nb::init<>());
  PoolingParams::VisitFields(FieldBinder<PoolingParams>{pooling});
}

}  // namespace kvanta::python
