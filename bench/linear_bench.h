// Benchmark of linear layers against the roofline: few rows by memory read bandwidth, many by the peak of the dot
// product. Results are verified against double before they are timed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvanta::kernels {

struct LinearShape {
  int64_t in = 0;
  int64_t out = 0;
};

struct LinearBench {
  // "bf16", "f32", "f16", "int8", "int4"; as quantized checkpoints have them: "fp8" (scales of 128 weights), "w8a16"
  // (of rows), "w4a16" (of 128 weights), "nf4" (of 64); or a block format ("Q4_K").
  std::string weights = "bf16";
  std::string isa = "auto";  // a unit's name, as in MakeCpuOps
  int threads = 1;
  LinearShape shape;
  std::vector<int64_t> rows = {1};
  double seconds = 0.3;  // timed runs per row of the result, at least 3 passes
};

// Measured limits of the machine: bytes read and operations (two per multiply-add) per second.
struct LinearRoofline {
  double read_bytes = 0;
  double operations = 0;  // operations of these weights' dot
};

struct LinearBenchRow {
  std::string weights;
  std::string isa;
  int threads = 0;
  LinearShape shape;
  int64_t rows = 0;
  int64_t weight_bytes = 0;  // read by one run
  double ns = 0;             // time of the fastest run
  double bytes_per_second = 0;
  double operations_per_second = 0;
  double max_error = 0;  // against double, relative to the bound on the sum's rounding errors: at most 1
};

// Throws InputError for an unknown name.
LinearRoofline MeasureLinearRoofline(const std::string& weights, const std::string& isa, int threads);

// A layer of random weights whose products are timed one by one, to be compared in turns with another library's.
class LinearTimer {
 public:
  // Throws InputError for invalid options; `rows` has every number of rows that is timed.
  explicit LinearTimer(const LinearBench& options);
  ~LinearTimer();
  LinearTimer(const LinearTimer&) = delete;
  LinearTimer& operator=(const LinearTimer&) = delete;

  // Makes random rows and compares their product with double and with those of the rows alone; throws Error if they
  // differ. Returns the largest error relative to the bound on the sum's rounding errors.
  double Verify(int64_t rows);
  // Nanoseconds of a product of the rows that were verified last; with few rows, mean over copies of the layer that
  // together exceed the caches.
  double Time();
  int64_t WeightBytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// One row per number of rows. With up to 16 rows, runs cycle through copies of the layer that together exceed the
// caches. Throws InputError for invalid options, and Error, before anything is timed, if a row differs from double or
// from the product of the row alone.
std::vector<LinearBenchRow> RunLinearBench(const LinearBench& options);

}  // namespace kvanta::kernels
