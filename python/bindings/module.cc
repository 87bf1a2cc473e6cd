// kvanta._core: bindings of the C++ library. Internal: the package kvanta is the interface.
#include "bindings.h"
#include "kvanta/version.h"

NB_MODULE(_core, module) {
#ifdef NDEBUG
  // Threads of other packages (Ray's) may still hold objects when the interpreter ends, which is no leak.
  nanobind::set_leak_warnings(false);
#endif
  module.doc() = "The C++ library of kvanta. Use the package kvanta; names here may change.";
  module.def("version", &kvanta::Version, "major.minor.patch");
  kvanta::python::BindErrors(module);
  kvanta::python::BindFormats(module);
  kvanta::python::BindSampling(module);
  kvanta::python::BindAttention(module);
  kvanta::python::BindLinearBench(module);
  kvanta::python::BindRecurrentBench(module);
  kvanta::python::BindConstraint(module);
  kvanta::python::BindCacheFolder(module);
  kvanta::python::BindJsonTexts(module);
  kvanta::python::BindModelInfo(module);
  kvanta::python::BindKvEvents(module);
  kvanta::python::BindEngine(module);
}
