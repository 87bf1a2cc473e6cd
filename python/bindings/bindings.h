// Parts of the module kvanta._core: one function per subject, each in the file of its name.
#pragma once

#include <nanobind/nanobind.h>

namespace kvanta::python {

void BindErrors(nanobind::module_& module);
void BindFormats(nanobind::module_& module);
void BindSampling(nanobind::module_& module);
void BindAttention(nanobind::module_& module);
void BindLinearBench(nanobind::module_& module);
void BindRecurrentBench(nanobind::module_& module);
void BindConstraint(nanobind::module_& module);
void BindCacheFolder(nanobind::module_& module);
void BindJsonTexts(nanobind::module_& module);
void BindModelInfo(nanobind::module_& module);
void BindKvEvents(nanobind::module_& module);
void BindEngine(nanobind::module_& module);

}  // namespace kvanta::python
