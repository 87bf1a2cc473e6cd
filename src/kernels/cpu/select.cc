#include "kernels/cpu/select.h"

#include <cpuid.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "kernels/ops.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

// What CPUID and XCR0 say, each feature with the register state it needs already considered.
struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA, F16C, BMI2
  bool avx512 = false;  // F, BW, VL, DQ, VBMI, VNNI, BF16
  bool amx = false;     // and tiles of bytes and BF16
};

struct CpuidResult {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidResult Cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidResult r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// Extended register states that the operating system saves.
uint64_t EnabledStates() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Tiles are too large for Linux to keep them for every thread unasked (5.16 and later).
constexpr long kTileData = 18;
bool KnowsTiles() {
  constexpr long kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  uint64_t states = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &states) == 0 && (states >> kTileData & 1) != 0;
}
// Asks once, for all threads, and for good: a thread's stack for signals must have room for tiles from then on. So only
// where they will be used.
bool MayUseTiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

constexpr bool HasAll(uint64_t value, uint64_t mask) {
  return (value & mask) == mask;
}
constexpr uint32_t Bit(int i) {
  return uint32_t{1} << i;
}

CpuFeatures DetectFeatures() {
  const CpuidResult leaf1 = Cpuid(1, 0);
  if (!HasAll(leaf1.ecx, Bit(27))) return {};  // OSXSAVE
  const CpuidResult leaf7 = Cpuid(7, 0);
  const CpuidResult leaf7_1 = leaf7.eax >= 1 ? Cpuid(7, 1) : CpuidResult{};
  const uint64_t states = EnabledStates();
  constexpr uint64_t kYmmStates = 0x6;       // SSE, AVX
  constexpr uint64_t kZmmStates = 0xe6;      // and opmask, upper zmm0-15, zmm16-31
  constexpr uint64_t kTileStates = 0x60000;  // of AMX: configuration, data
  CpuFeatures features;
  features.avx2 = HasAll(states, kYmmStates) && HasAll(leaf1.ecx, Bit(12) | Bit(28) | Bit(29)) &&  // FMA AVX F16C
                  HasAll(leaf7.ebx, Bit(5) | Bit(8));                                              // AVX2 BMI2
  features.avx512 = features.avx2 && HasAll(states, kZmmStates) &&
                    HasAll(leaf7.ebx, Bit(16) | Bit(17) | Bit(30) | Bit(31)) &&  // F DQ BW VL
                    HasAll(leaf7.ecx, Bit(1) | Bit(11)) &&                       // VBMI VNNI
                    HasAll(leaf7_1.eax, Bit(5));                                 // BF16
  features.amx = features.avx512 && HasAll(states, kTileStates) &&
                 HasAll(leaf7.edx, Bit(22) | Bit(24) | Bit(25)) &&  // BF16, TILE, INT8
                 KnowsTiles();
  return features;
}

struct Unit {
  const IsaTable& (*table)();
  bool (*runs)(const CpuFeatures&);
};

// Every unit, best first.
constexpr Unit kUnits[] = {
    {AmxTable, [](const CpuFeatures& cpu) { return cpu.amx; }},
    {Avx512Table, [](const CpuFeatures& cpu) { return cpu.avx512; }},
    {Avx2Table, [](const CpuFeatures& cpu) { return cpu.avx2; }},
    {PortableTable, [](const CpuFeatures&) { return true; }},
};

const std::vector<const IsaTable*>& RunnableTables() {
  static const std::vector<const IsaTable*> tables = [] {
    std::vector<const IsaTable*> runnable;
    const CpuFeatures features = DetectFeatures();
    for (const Unit& unit : kUnits) {
      if (unit.runs(features)) runnable.push_back(&unit.table());
    }
    return runnable;
  }();
  return tables;
}

}  // namespace

std::span<const char* const> RunnableIsas() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> list;
    for (const IsaTable* table : RunnableTables()) list.push_back(table->name);
    return list;
  }();
  return names;
}

const IsaTable& SelectIsa(std::string_view isa) {
  const char* source = "isa";
  if (isa == "auto") {
    const char* forced = std::getenv("KVANTA_ISA");
    if (forced == nullptr || *forced == '\0' || std::string_view(forced) == "auto") {
      const IsaTable& best = *RunnableTables().front();
      return &best == &AmxTable() && !MayUseTiles() ? Avx512Table() : best;
    }
    isa = forced;
    source = "KVANTA_ISA";
  }
  for (const IsaTable* table : RunnableTables()) {
    if (isa != table->name) continue;
    if (table == &AmxTable() && !MayUseTiles()) {
      throw InputError(fmt::format("{} is '{}'; the system does not let this process use AMX", source, isa));
    }
    return *table;
  }
  throw InputError(
      fmt::format("{} is '{}'; this machine runs: auto, {}", source, isa, fmt::join(RunnableIsas(), ", ")));
}

}  // namespace kvanta::kernels
