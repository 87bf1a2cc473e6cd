#include "kernels/cpu/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernels/cpu/built_units.h"
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
  const IsaTable& (*table)();  // null: left out of this build
  bool (*is_supported)();      // by the CPU and the operating system
  bool (*enable)();            // requests what the unit needs from the system before its first use; null: nothing

  bool IsRunnable() const { return table != nullptr && is_supported(); }
  bool Enable() const { return enable == nullptr || enable(); }
};

// Every unit of this architecture, best first. The place of zen4 depends on the CPU.
constexpr Unit kUnits[] = {
#if defined(__x86_64__)
    {IsBuilt("amx") ? AmxTable : nullptr, [] { return DetectCpuFeatures().amx; }, RequestAmxPermission},
    {IsBuilt("zen4") ? Zen4Table : nullptr, [] { return DetectCpuFeatures().fast_avx512_bf16; }, nullptr},
    {IsBuilt("avx512fp16") ? Avx512Fp16Table : nullptr, [] { return DetectCpuFeatures().avx512_fp16; }, nullptr},
    {IsBuilt("avx512") ? Avx512Table : nullptr, [] { return DetectCpuFeatures().avx512; }, nullptr},
    {IsBuilt("zen4") ? Zen4Table : nullptr,
     [] { return DetectCpuFeatures().avx512_bf16 && !DetectCpuFeatures().fast_avx512_bf16; }, nullptr},
    {IsBuilt("avx2") ? Avx2Table : nullptr, [] { return DetectCpuFeatures().avx2; }, nullptr},
#elif defined(__aarch64__)
    {I8mmTable, [] { return DetectCpuFeatures().i8mm; }, nullptr},
    {DotprodTable, [] { return DetectCpuFeatures().dotprod; }, nullptr},
    {NeonTable, [] { return true; }, nullptr},
#endif
    {IsBuilt("portable") ? PortableTable : nullptr, [] { return true; }, nullptr},
};

}  // namespace

std::span<const char* const> RunnableIsas() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> runnable;
    for (const Unit& unit : kUnits) {
      if (unit.IsRunnable()) runnable.push_back(unit.table().name);
    }
    if (runnable.empty()) {
      throw InputError("this build has kernels only for another machine's CPU (KVANTA_UNITS=native): build it here");
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
      RunnableIsas();  // throws where there is none
      return std::ranges::find_if(kUnits, [](const Unit& unit) { return unit.IsRunnable() && unit.Enable(); })->table();
    }
    isa = forced;
    source = "KVANTA_ISA";
  }
  for (const Unit& unit : kUnits) {
    if (!unit.IsRunnable() || isa != unit.table().name) continue;
    if (!unit.Enable()) {
      throw InputError(fmt::format("{} is '{}', but the system does not permit this process to use it", source, isa));
    }
    return unit.table();
  }
  throw InputError(fmt::format("{} is '{}'; this machine runs: auto, {}{}", source, isa,
                               fmt::join(RunnableIsas(), ", "),
                               IsBuilt(isa) ? "" : " (the unit is left out of this build: KVANTA_UNITS=native)"));
}

const char* SelectedIsa(std::string_view isa) {
  return SelectIsa(isa).name;
}

}  // namespace kvanta::kernels
