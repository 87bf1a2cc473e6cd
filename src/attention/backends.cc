#include "attention/backends.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "attention/cpu_backend.h"
#include "attention/gpu_backend.h"
#include "attention/gpu_layers.h"
#include "attention/reference_backend.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/ops.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

// A backend family: lists the instruction-set or GPU units that this machine supports ("" for a family without units),
// knows the formats of layers that it attends to, and creates a backend of a unit.
struct Family {
  std::string_view name;
  std::vector<std::string> (*units)();
  bool (*attends)(const formats::LayerScheme&);
  std::unique_ptr<Backend> (*make)(cache::PagePool&, BackendConfig, const std::shared_ptr<ThreadPool>&,
                                   const std::string&);
};

std::vector<std::string> CpuUnits() {
  const std::span<const char* const> isas = kernels::RunnableIsas();
  return {isas.begin(), isas.end()};
}

std::vector<std::string> CudaUnits() {
  std::vector<std::string> units;
  if (std::string unit = kernels::CudaUnit(); !unit.empty()) units.push_back(std::move(unit));
  return units;
}

const Family kFamilies[] = {
    {"cpu", CpuUnits, CpuSupports,
     [](cache::PagePool& pool, BackendConfig config, const std::shared_ptr<ThreadPool>& threads,
        const std::string& unit) { return MakeCpuBackend(pool, std::move(config), threads, unit.c_str()); }},
    {"cuda", CudaUnits, [](const formats::LayerScheme& layer) { return FindUnsupported(layer).empty(); },
     [](cache::PagePool& pool, BackendConfig config, const std::shared_ptr<ThreadPool>&, const std::string&) {
       return MakeGpuBackend(pool, std::move(config), kernels::MakeCudaContext());
     }},
    {"reference", [] { return std::vector<std::string>{""}; }, [](const formats::LayerScheme&) { return true; },
     [](cache::PagePool& pool, BackendConfig config, const std::shared_ptr<ThreadPool>&, const std::string&) {
       return MakeReferenceBackend(pool, std::move(config));
     }},
};

std::string NameOf(const Family& family, const std::string& unit) {
  return unit.empty() ? std::string(family.name) : fmt::format("{}-{}", family.name, unit);
}

}  // namespace

std::vector<std::string> BackendNames() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) {
    for (const std::string& unit : family.units()) names.push_back(NameOf(family, unit));
  }
  return names;
}

std::vector<std::string> BackendFamiliesOf(const formats::Format& format) {
  // A shape that every format takes.
  const formats::LayerShape shape = {.kv_heads = 1, .head_dim = 128, .rope_dim = 0};
  const formats::LayerShape latents = {.kv_heads = 1, .head_dim = 512, .rope_dim = 64};
  const bool is_latent = format.latents == formats::MlaSupport::kRequired;
  const formats::CacheLayout layout =
      formats::PlanCache({KvScheme::Parse(format.name)}, {is_latent ? latents : shape}, 64);
  std::vector<std::string> names;
  for (const Family& family : kFamilies) {
    if (family.attends(layout.layers[0])) names.emplace_back(family.name);
  }
  return names;
}

std::unique_ptr<Backend> MakeBackend(std::string_view name, cache::PagePool& pool, BackendConfig config,
                                     std::shared_ptr<ThreadPool> threads) {
  if (name == "auto") return MakeCpuBackend(pool, std::move(config), std::move(threads), "auto");
  for (const Family& family : kFamilies) {
    for (const std::string& unit : family.units()) {
      if (name == NameOf(family, unit)) return family.make(pool, std::move(config), threads, unit);
    }
  }
  throw InputError(
      fmt::format("unknown attention backend '{}'; this machine has: auto, {}", name, fmt::join(BackendNames(), ", ")));
}

}  // namespace kvanta::attention
