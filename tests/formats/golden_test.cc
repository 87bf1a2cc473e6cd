// Every encoder against the independent implementation in tests/oracle/kv_formats.py, byte for byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/dtype.h"
#include "formats/all.h"
#include "formats/bytes.h"
#include "formats/cell_codec.h"

namespace kvanta::formats {
namespace {

using nlohmann::json;

json Golden(const std::string& name) {
  std::ifstream file(std::string(KVANTA_TEST_DATA) + "/golden/" + name + ".json");
  if (!file) ADD_FAILURE() << "no golden vectors of " << name << ": run tests/oracle/make_format_golden.py";
  return json::parse(file);
}

std::vector<uint8_t> FromHex(const std::string& hex) {
  std::vector<uint8_t> bytes(hex.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<uint8_t>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  return bytes;
}

struct Input {
  CellShape shape{};
  std::vector<float> x;
};

std::map<std::string, Input> Inputs() {
  std::map<std::string, Input> inputs;
  const json golden = Golden("inputs");
  for (const json& entry : golden["inputs"]) {
    Input input{.shape = {entry["tokens"], entry["head_dim"]}, .x = {}};
    const auto bytes = FromHex(entry["x"]);
    for (size_t i = 0; i < bytes.size(); i += 4) input.x.push_back(LoadBytes<float>(bytes.data() + i));
    inputs[entry["name"]] = input;
  }
  return inputs;
}

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, BytesAndCounts) {
  const auto inputs = Inputs();
  const json cases = Golden(GetParam())["cases"];
  ASSERT_GE(cases.size(), 4U);
  for (const json& entry : cases) {
    const Input& input = inputs.at(entry["input"]);
    const KvScheme scheme = KvScheme::Parse(entry["scheme"].get<std::string>());
    const CellParameters parameters{.static_scale = entry["static_scale"]};
    EncodeCounts counts;
    const auto bytes = EncodeCell(scheme, SideKind::kK, input.x, input.shape, parameters, &counts);
    EXPECT_EQ(bytes, FromHex(entry["bytes"])) << entry["scheme"] << " of " << entry["input"];
    EXPECT_EQ(counts.saturated, entry["saturated"]) << entry["scheme"] << " of " << entry["input"];
    EXPECT_EQ(counts.nan, entry["nan"]) << entry["scheme"] << " of " << entry["input"];
    EXPECT_EQ(counts.values, std::ssize(input.x));
    EXPECT_EQ(EncodeCell(scheme, SideKind::kV, input.x, input.shape, parameters), bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(AllFormats, GoldenTest, testing::ValuesIn(FormatNames()),
                         [](const auto& instance) { return instance.param; });

// FNV-1a-64 of each run of `chunk` values.
template <class T>
std::vector<std::string> ChunkHashes(const std::vector<T>& values, size_t chunk) {
  std::vector<std::string> hashes;
  for (size_t begin = 0; begin < values.size(); begin += chunk) {
    uint64_t hash = 0xcbf29ce484222325U;
    for (size_t i = 0; i < chunk * sizeof(T); ++i) {
      hash = (hash ^ reinterpret_cast<const uint8_t*>(values.data() + begin)[i]) * 0x100000001b3U;
    }
    char text[17];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
    hashes.emplace_back(text);
  }
  return hashes;
}

// A NaN's payload is no part of a format.
uint16_t CanonicalNan(uint16_t bits, float value) {
  return std::isnan(value) ? uint16_t{0x7fff} : bits;
}

std::vector<float> AllValues(const std::string& source) {
  std::vector<float> values(65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    values[i] = source == "bf16" ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
  }
  return values;
}

TEST(Exhaustive, EveryBf16AndFp16ValueEncodesAsMlDtypes) {
  const json golden = Golden("exhaustive");
  for (const std::string source : {"bf16", "fp16"}) {
    const auto x = AllValues(source);
    for (const std::string target : {"fp8_e4m3", "fp8_e5m2", "bf16", "fp16"}) {
      const Format& format = Find(target);
      std::vector<uint8_t> codes(x.size() * static_cast<size_t>(format.code_bits) / 8);
      EncodeCounts counts;
      for (size_t i = 0; i < x.size(); i += 64) {
        format.encode_row(x.data() + i, 64, 1.0F,
                          {codes.data() + i * static_cast<size_t>(format.code_bits) / 8, {}, {}}, counts);
      }
      const json& expected = golden[target + " from " + source];
      if (format.code_bits == 8) {
        EXPECT_EQ(json(ChunkHashes(codes, 1024)), expected) << target << " from " << source;
        continue;
      }
      std::vector<uint16_t> bits(x.size());
      for (size_t i = 0; i < x.size(); ++i) bits[i] = CanonicalNan(LoadBytes<uint16_t>(codes.data() + 2 * i), x[i]);
      EXPECT_EQ(json(ChunkHashes(bits, 1024)), expected) << target << " from " << source;
    }
  }
}

TEST(Exhaustive, EveryCodeDecodesAsMlDtypes) {
  const json golden = Golden("exhaustive");
  for (const std::string target : {"fp8_e4m3", "fp8_e5m2", "bf16", "fp16"}) {
    const Format& format = Find(target);
    const size_t n = format.code_bits == 8 ? 256 : 65536;
    std::vector<uint8_t> codes(n * static_cast<size_t>(format.code_bits) / 8);
    for (size_t i = 0; i < n; ++i) {
      if (format.code_bits == 8) codes[i] = static_cast<uint8_t>(i);
      if (format.code_bits == 16) StoreBytes(codes.data() + 2 * i, static_cast<uint16_t>(i));
    }
    std::vector<float> x(n);
    format.decode_row({codes.data(), nullptr, nullptr}, static_cast<int>(n), 1.0F, x.data());
    std::vector<uint32_t> bits(n);
    for (size_t i = 0; i < n; ++i) bits[i] = std::isnan(x[i]) ? 0x7fffffffU : std::bit_cast<uint32_t>(x[i]);
    EXPECT_EQ(json(ChunkHashes(bits, std::min<size_t>(n, 1024))), golden["fp32 from " + target]) << target;
  }
}

}  // namespace
}  // namespace kvanta::formats
