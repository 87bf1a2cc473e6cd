// Benchmark of recurrent layers without their projections: decode by the bandwidth at which states are read and
// written, prompts by the peak of f32 multiply-adds. Results are verified before they are timed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvanta::kernels {

struct RecurrentBench {
  std::string layer;         // one of RecurrentLayerNames()
  std::string isa = "auto";  // a unit's name, as in MakeCpuOps
  int threads = 1;
  int64_t sequences = 1;  // in a step, each with a state
  int64_t tokens = 1;     // of each sequence
  double seconds = 0.3;   // timed runs, at least 3
};

// Measured limits of the machine, per second: bytes of a buffer that is updated in place, each counted when it is read
// and when it is written, and operations of f32 multiply-adds (two each).
struct RecurrentRoofline {
  double updated_bytes = 0;
  double operations = 0;
};

struct RecurrentBenchRow {
  std::string layer, kernel, isa;
  int threads = 0;
  int64_t sequences = 0, tokens = 0;
  int64_t state_bytes = 0;      // of a sequence
  double ns = 0;                // time of the fastest run
  double bytes_per_second = 0;  // states, read once and written once
  // Two for each vector instruction of the state's update and of the convolution, be it a multiply-add or a product.
  double operations_per_second = 0;
  double max_error = 0;  // RMS difference from the portable unit, relative
};

// "qwen3.6-27b", ...: shapes of published models.
std::vector<std::string> RecurrentLayerNames();

RecurrentRoofline MeasureRecurrentRoofline(const std::string& isa, int threads);

// With one token, runs cycle through states that together exceed the caches, as the layers of a model do. Throws
// InputError for invalid options, and Error, before anything is timed, if the result differs from the portable unit's
// by more than roundings, or from that of single tokens in any bit.
RecurrentBenchRow RunRecurrentBench(const RecurrentBench& options);

}  // namespace kvanta::kernels
