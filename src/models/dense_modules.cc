#include "models/dense_modules.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "base/json.h"
#include "kvanta/error.h"
#include "models/weights.h"
#include "weights/safetensors.h"

namespace kvanta::models {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxFeatures = int64_t{1} << 20;

bool IsTanh(const JsonObject& config) {
  constexpr const char* kKey = "activation_function";
  const std::string name = config.String(kKey, "torch.nn.modules.activation.Tanh");  // the class's default
  if (name.ends_with(".Tanh")) return true;
  if (!name.ends_with(".Identity")) config.Fail(kKey, "torch's Identity or Tanh");
  return false;
}

DenseModule ReadDenseModule(const fs::path& folder, int64_t in, kernels::Ops& ops) {
  const std::string file = (folder / "config.json").string();
  const Json json = ParseConfigJson(ReadTextFile(file), file);
  const JsonObject config(json, file);
  DenseModule module{.in = config.Int("in_features", 1, kMaxFeatures),
                     .out = config.Int("out_features", 1, kMaxFeatures),
                     .weight = {},
                     .bias = {},
                     .tanh = IsTanh(config)};
  if (module.in != in) config.Fail("in_features", fmt::format("{}, the channels of what comes before", in));
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(folder.string());
  WeightReader reader(checkpoint, ops, false, {}, false, nullptr);
  module.weight = reader.Matrix("linear.weight", module.out, module.in, kernels::WeightType::kF32);
  if (config.Bool("bias", true)) module.bias = reader.KeptValues("linear.bias", module.out);
  return module;
}

}  // namespace

std::vector<double> DenseModule::Forward(std::span<const double> x) const {
  std::vector<double> y;
  for (int64_t row = 0; row < out; ++row) {
    double sum = bias.empty() ? 0.0 : double{bias[static_cast<size_t>(row)]};
    for (int64_t i = 0; i < in; ++i)
      sum += double{weight[static_cast<size_t>(row * in + i)]} * x[static_cast<size_t>(i)];
    y.push_back(tanh ? std::tanh(sum) : sum);
  }
  return y;
}

std::vector<DenseModule> ReadDenseModules(const std::string& folder, int64_t hidden, kernels::Ops& ops) {
  const fs::path file = fs::path(folder) / "modules.json";
  std::vector<DenseModule> modules;
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored)) return modules;
  const std::string name = file.string();
  const Json list = ParseConfigJson(ReadTextFile(name), name);
  if (!list.is_array()) throw InputError(fmt::format("{}: {}; expected a list of modules", name, Describe(list)));
  for (const Json& each : list) {
    const JsonObject module(each, name);
    if (!module.String("type", "").ends_with(".Dense")) continue;
    const std::string path = module.String("path");
    if (path.empty() || fs::path(path).filename() != path) module.Fail("path", "the name of a folder next to it");
    modules.push_back(ReadDenseModule(fs::path(folder) / path, modules.empty() ? hidden : modules.back().out, ops));
  }
  return modules;
}

}  // namespace kvanta::models
