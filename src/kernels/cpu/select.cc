#include "kernels/cpu/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernels/ops.h"
#include "kvanta/error.h"
#if defined(__x86_64__)
#include "kernels/cpu/x86/cpu_features.h"
#elif defined(__aarch64__)
#include "kernels/cpu/arm/cpu_features.h"
#endif

namespace kvanta::kernels {
namespace {

struct Unit {
  const IsaTable& (*table)();
  bool (*is_supported)();  // by the CPU and the operating system
  bool (*enable)();        // requests what the unit needs from the system before its first use; null: nothing

  bool Enable() const { return enable == nullptr || enable(); }
};

// Every unit of this architecture, best first. The place of zen4 depends on the CPU.
constexpr Unit kUnits[] = {
#if defined(__x86_64__)
    {AmxTable, [] { return DetectCpuFeatures().amx; }, RequestAmxPermission},
    {Zen4Table, [] { return DetectCpuFeatures().fast_avx512_bf16; }, nullptr},
    {Avx512Fp16Table, [] { return DetectCpuFeatures().avx512_fp16; }, nullptr},
    {Avx512Table, [] { return DetectCpuFeatures().avx512; }, nullptr},
    {Zen4Table, [] { return DetectCpuFeatures().avx512_bf16 && !DetectCpuFeatures().fast_avx512_bf16; }, nullptr},
    {Avx2Table, [] { return DetectCpuFeatures().avx2; }, nullptr},
#elif defined(__aarch64__)
    {I8mmTable, [] { return DetectCpuFeatures().i8mm; }, nullptr},
    {DotprodTable, [] { return DetectCpuFeatures().dotprod; }, nullptr},
    {NeonTable, [] { return true; }, nullptr},
#endif
    {PortableTable, [] { return true; }, nullptr},
};

}  // namespace

std::span<const char* const> RunnableIsas() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> runnable;
    for (const Unit& unit : kUnits) {
      if (unit.is_supported()) runnable.push_back(unit.table().name);
    }
    return runnable;
  }();
  return names;
}

const IsaTable& SelectIsa(std::string_view isa) {
  const char* source = "isa";
  if (isa == "auto") {
    const char* forced = std::getenv("KVANTA_ISA");
    if (forced == nullptr || *forced == '\0' || std::string_view(forced) == "auto") {
      return std::ranges::find_if(kUnits, [](const Unit& unit) { return unit.is_supported() && unit.Enable(); })
          ->table();
    }
    isa = forced;
    source = "KVANTA_ISA";
  }
  for (const Unit& unit : kUnits) {
    if (!unit.is_supported() || isa != unit.table().name) continue;
    if (!unit.Enable()) {
      throw InputError(fmt::format("{} is '{}', but the system does not permit this process to use it", source, isa));
    }
    return unit.table();
  }
  throw InputError(
      fmt::format("{} is '{}'; this machine runs: auto, {}", source, isa, fmt::join(RunnableIsas(), ", ")));
}

}  // namespace kvanta::kernels
