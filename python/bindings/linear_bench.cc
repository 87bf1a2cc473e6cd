// The benchmark of linear layers.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bench/linear_bench.h"
#include "bindings.h"

namespace nb = nanobind;

namespace kvanta::python {
namespace {

using nb::literals::operator""_a;

using kernels::LinearBench;
using kernels::LinearBenchRow;
using kernels::LinearTimer;

nb::dict RowDict(const LinearBenchRow& row) {
  nb::dict result;
  result["weights"] = row.weights;
  result["isa"] = row.isa;
  result["threads"] = row.threads;
  result["in"] = row.shape.in;
  result["out"] = row.shape.out;
  result["rows"] = row.rows;
  result["weight_bytes"] = row.weight_bytes;
  result["ns"] = row.ns;
  result["bytes_per_second"] = row.bytes_per_second;
  result["operations_per_second"] = row.operations_per_second;
  result["max_error"] = row.max_error;
  return result;
}

std::vector<nb::dict> Run(std::string weights, std::string isa, int threads, int64_t in, int64_t out,
                          std::vector<int64_t> rows, double seconds) {
  LinearBench options;
  options.weights = std::move(weights);
  options.isa = std::move(isa);
  options.threads = threads;
  options.shape = {.in = in, .out = out};
  options.rows = std::move(rows);
  options.seconds = seconds;
  std::vector<LinearBenchRow> measured;
  {
    nb::gil_scoped_release release;
    measured = kernels::RunLinearBench(options);
  }
  std::vector<nb::dict> result;
  for (const LinearBenchRow& row : measured) result.push_back(RowDict(row));
  return result;
}

}  // namespace

void BindLinearBench(nb::module_& module) {
  module.def(
      "linear_limits",
      [](const std::string& weights, const std::string& isa, int threads) {
        const kernels::LinearRoofline roofline = kernels::MeasureLinearRoofline(weights, isa, threads);
        return std::pair(roofline.read_bytes, roofline.operations);
      },
      "weights"_a, "isa"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Roofline of the machine: (bytes read, operations) per second.");
  module.def("run_linear_bench", &Run, "weights"_a, "isa"_a, "threads"_a, "in_"_a, "out"_a, "rows"_a, "seconds"_a,
             nb::sig("def run_linear_bench(weights: str, isa: str, threads: int, in_: int, out: int, rows: "
                     "collections.abc.Sequence[int], seconds: float) -> list[dict[str, typing.Any]]"));
  nb::class_<LinearTimer>(module, "LinearTimer",
                          "A layer of random weights whose products are timed one by one, in turns with others.")
      .def(
          "__init__",
          [](LinearTimer* self, std::string weights, std::string isa, int threads, int64_t in, int64_t out) {
            new (self) LinearTimer({.weights = std::move(weights),
                                    .isa = std::move(isa),
                                    .threads = threads,
                                    .shape = {.in = in, .out = out}});
          },
          "weights"_a, "isa"_a, "threads"_a, "in_"_a, "out"_a)
      .def("verify", &LinearTimer::Verify, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Makes random rows and verifies their product; returns the largest error relative to its bound.")
      .def("time", &LinearTimer::Time, nb::call_guard<nb::gil_scoped_release>(),
           "Nanoseconds of a product of the rows verified last; with few rows, weights are read from memory.");
}

}  // namespace kvanta::python
