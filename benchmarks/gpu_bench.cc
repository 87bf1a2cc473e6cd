// Decode attention on this machine's GPU, with its share of the copy bandwidth measured in the same run (`kvanta bench
// attention --device cuda` without Python).
//
//   gpu_bench [--formats bf16 ...] [--heads 32] [--kv-heads 8] [--head-dim 128] [--shape BATCHxCONTEXT ...]
//             [--query-tokens 1] [--json FILE]
//
// Exit status 77 without a usable GPU.
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/gpu_bench.h"
#include "bench/option_parser.h"

namespace {

using kvanta::attention::AttentionBench;
using kvanta::attention::GpuBenchRow;

struct Shape {
  int batch;
  int64_t context;
};
struct Options {
  AttentionBench bench;
  std::vector<Shape> shapes = {{64, 8192}, {1, 131072}};
  std::string json;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  options.bench.formats = {"bf16",
                           "fp8",
                           "int8",
                           "int4+exact=none",
                           "nvfp4+exact=none",
                           "k=int8,v=int4+exact=none",
                           "int2_g32+exact=none",
                           "kivi4",
                           "mla_fp8",
                           "mla_int4+exact=none"};
  kvanta::OptionParser parser;
  parser.Option("--formats", options.bench.formats);
  parser.Option("--heads", options.bench.heads);
  parser.Option("--kv-heads", options.bench.kv_heads);
  parser.Option("--head-dim", options.bench.head_dim);
  parser.Option("--query-tokens", options.bench.query_tokens);
  parser.Pairs("--shape", options.shapes);
  parser.Option("--json", options.json);
  parser.Parse(argc, argv);
  return options;
}

void Run(Options options) {
  const std::shared_ptr<kvanta::kernels::CudaContext> gpu = kvanta::kernels::MakeCudaContext();
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape shape : options.shapes) {
    options.bench.batch = shape.batch;
    options.bench.context = shape.context;
    for (const GpuBenchRow& row : RunGpuBench(options.bench, gpu)) {
      const double visible = static_cast<double>(row.context) + (row.query_tokens + 1) / 2.0;  // keys of a query, mean
      const double flops = 4.0 * options.bench.heads * options.bench.head_dim * row.batch * row.query_tokens * visible;
      fmt::print("{:>3} x {:<7} {:<24} {:8.1f} us  {:7.1f} GB/s of {:7.1f}: {:5.1f} %  {:6.1f} TFLOP/s  error {:.2e}\n",
                 row.batch, row.context, row.format, row.ns_median * 1e-3, row.gb_s, row.copy_gb_s,
                 100 * row.share_of_limit, flops / row.ns_median * 1e-3, row.max_error);
      rows.push_back({{"format", row.format},
                      {"unit", row.unit},
                      {"batch", row.batch},
                      {"context", row.context},
                      {"query_tokens", row.query_tokens},
                      {"tflop_s", flops / row.ns_median * 1e-3},
                      {"bytes", row.bytes},
                      {"ns_min", row.ns_min},
                      {"ns_median", row.ns_median},
                      {"copy_gb_s", row.copy_gb_s},
                      {"gb_s", row.gb_s},
                      {"share_of_limit", row.share_of_limit},
                      {"max_error", row.max_error}});
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << rows.dump(1) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options = ParseArguments(argc, argv);
    if (const std::string missing = kvanta::kernels::MissingForCuda(); !missing.empty()) {
      fmt::print("skipped: {}\n", missing);
      return 77;
    }
    Run(std::move(options));
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_bench: {}\n", error.what());
    return 1;
  }
}
