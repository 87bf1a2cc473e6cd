// The benchmark of recurrent layers.
#include "bench/recurrent_bench.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "bindings.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

using nb::literals::operator""_a;

nb::dict RunRecurrent(std::string layer, std::string isa, int threads, int64_t sequences, int64_t tokens,
                      double seconds) {
  kernels::RecurrentBenchRow row;
  {
    nb::gil_scoped_release release;
    row = kernels::RunRecurrentBench({.layer = std::move(layer),
                                      .isa = std::move(isa),
                                      .threads = threads,
                                      .sequences = sequences,
                                      .tokens = tokens,
                                      .seconds = seconds});
  }
  nb::dict result;
  result["layer"] = row.layer;
  result["kernel"] = row.kernel;
  result["isa"] = row.isa;
  result["threads"] = row.threads;
  result["sequences"] = row.sequences;
  result["tokens"] = row.tokens;
  result["state_bytes"] = row.state_bytes;
  result["ns"] = row.ns;
  result["bytes_per_second"] = row.bytes_per_second;
  result["operations_per_second"] = row.operations_per_second;
  result["max_error"] = row.max_error;
  return result;
}

}  // namespace

void BindRecurrentBench(nb::module_& module) {
  module.def("recurrent_layers", &kernels::RecurrentLayerNames, "Names of the layers that run_recurrent_bench takes.");
  module.def(
      "recurrent_limits",
      [](const std::string& isa, int threads) {
        const kernels::RecurrentRoofline roofline = kernels::MeasureRecurrentRoofline(isa, threads);
        return std::pair(roofline.updated_bytes, roofline.operations);
      },
      "isa"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Roofline of the machine: (bytes read and written in place, operations) per second.");
  module.def("run_recurrent_bench", &RunRecurrent, "layer"_a, "isa"_a, "threads"_a, "sequences"_a, "tokens"_a,
             "seconds"_a,
             nb::sig("def run_recurrent_bench(layer: str, isa: str, threads: int, sequences: int, tokens: int, "
                     "seconds: float) -> dict[str, typing.Any]"));
}

}  // namespace kvanta::python
