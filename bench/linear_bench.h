// Measures linear layers as shares of what the machine can do: few rows by the read bandwidth of memory, many by the
// peak of the dot product. Every result is verified against double before it is timed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvanta::kernels {

struct LinearShape {
  int64_t in = 0;
  int64_t out = 0;
};

struct LinearBench {
  std::string weights = "bf16";  // "bf16", "f32", "f16", "int8", "int4"
  std::string isa = "auto";      // a unit's name, as in MakeCpuOps
  int threads = 1;
  LinearShape shape;
  std::vector<int64_t> rows = {1};
  double seconds = 0.3;  // of timed runs per row of the result, at least 3 passes
};

// What the machine does at most, measured for a while: bytes read and operations (two per multiply-add) per second.
struct LinearRoofline {
  double read_bytes = 0;
  double operations = 0;  // of the dot that such weights meet, all operands in registers
};

struct LinearBenchRow {
  std::string weights;
  std::string isa;
  int threads = 0;
  LinearShape shape;
  int64_t rows = 0;
  int64_t weight_bytes = 0;  // that one run reads
  double ns = 0;             // of the fastest run
  double bytes_per_second = 0;
  double operations_per_second = 0;
  double max_error = 0;  // against double, in units of the largest rounding that the sum allows: at most 1
};

// Throw InputError for a name that is none.
LinearRoofline MeasureLinearRoofline(const std::string& weights, const std::string& isa, int threads);

// One row per number of rows. Up to 16 rows copies of the layer, together beyond the caches, take turns. Throws
// InputError for options that do not fit, Error when a row differs from double or from the row alone (nothing is timed
// then).
std::vector<LinearBenchRow> RunLinearBench(const LinearBench& options);

}  // namespace kvanta::kernels
