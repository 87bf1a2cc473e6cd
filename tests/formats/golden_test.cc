// Every encoder against the independent implementation in tests/oracle/kv_formats.py, byte for byte.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/dtype.h"
#include "formats/all.h"
#include "formats/bytes.h"
#include "formats/cell_codec.h"
#include "formats/minifloat.h"

namespace kvanta::formats {
namespace {

using GoldenJson = nlohmann::json;

GoldenJson Golden(const std::string& name) {
  std::ifstream file(std::string(KVANTA_TEST_DATA) + "/golden/" + name + ".json");
  if (!file) ADD_FAILURE() << "no golden vectors of " << name << ": run tests/oracle/make_format_golden.py";
  return GoldenJson::parse(file);
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
  const GoldenJson golden = Golden("inputs");
  for (const GoldenJson& entry : golden["inputs"]) {
    Input input{.shape = {entry["tokens"], entry["head_dim"]}, .x = {}};
    const auto bytes = FromHex(entry["x"]);
    for (size_t i = 0; i < bytes.size(); i += 4) input.x.push_back(LoadBytes<float>(bytes.data() + i));
    inputs[entry["name"]] = input;
  }
  return inputs;
}

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

// Hashes of the bits of numbers; a NaN's payload is no part of a format.
GoldenJson ValueHashes(const std::vector<float>& x, size_t chunk) {
  std::vector<uint32_t> bits(x.size());
  for (size_t i = 0; i < x.size(); ++i) bits[i] = std::isnan(x[i]) ? 0x7fffffffU : std::bit_cast<uint32_t>(x[i]);
  return ChunkHashes(bits, chunk);
}

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, BytesCountsAndValuesOnBothSides) {
  const auto inputs = Inputs();
  const GoldenJson cases = Golden(GetParam())["cases"];
  std::map<SideKind, int> seen;
  for (const GoldenJson& entry : cases) {
    const Input& input = inputs.at(entry["input"]);
    const KvScheme scheme = KvScheme::Parse(entry["scheme"].get<std::string>());
    // The vectors' values are still transformed: decoded by the scheme without its transform.
    KvScheme plain = scheme;
    plain.k.hadamard = plain.v.hadamard = false;
    const CellParameters parameters{.static_scale = entry["static_scale"]};
    const auto sides = entry["side"].get<std::string>();
    for (const char side : sides) {
      const SideKind kind = ParseSideKind(std::string(1, side));
      const std::string what = fmt::format("{} of {}, {}", scheme.ToString(), entry["input"].get<std::string>(), side);
      EncodeCounts counts;
      const auto bytes = EncodeCell(scheme, kind, input.x, input.shape, parameters, &counts);
      const auto expected = FromHex(entry["bytes"]);
      ASSERT_EQ(bytes.size(), expected.size()) << what;
      const auto differing = std::mismatch(bytes.begin(), bytes.end(), expected.begin()).first;
      EXPECT_EQ(differing - bytes.begin(), std::ssize(bytes)) << "first byte that differs of " << what;
      EXPECT_EQ(counts.saturated, entry["saturated"]) << what;
      EXPECT_EQ(counts.nan, entry["nan"]) << what;
      EXPECT_EQ(counts.values, std::ssize(input.x));
      const auto values = DecodeCell(plain, kind, expected, input.shape, parameters);
      EXPECT_EQ(ValueHashes(values, values.size())[0], entry["decoded"]) << what;
      ++seen[kind];
    }
  }
  EXPECT_GE(seen[SideKind::kK], 2);
  EXPECT_GE(seen[SideKind::kV], 4);
}

INSTANTIATE_TEST_SUITE_P(AllFormats, GoldenTest, testing::ValuesIn(FormatNames()),
                         [](const auto& instance) { return instance.param; });

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
  const GoldenJson golden = Golden("exhaustive");
  for (const std::string source : {"bf16", "fp16"}) {
    const auto x = AllValues(source);
    for (const std::string target : {"fp8_e4m3", "fp8_e5m2", "bf16", "fp16"}) {
      const Format& format = Find(target);
      std::vector<uint8_t> codes(x.size() * static_cast<size_t>(format.code_bits) / 8);
      EncodeCounts counts;
      for (size_t i = 0; i < x.size(); i += 64) {
        format.encode_row(x.data() + i, 64, 1.0F,
                          {.codes = codes.data() + i * static_cast<size_t>(format.code_bits) / 8}, counts);
      }
      const GoldenJson& expected = golden[target + " from " + source];
      if (format.code_bits == 8) {
        EXPECT_EQ(GoldenJson(ChunkHashes(codes, 1024)), expected) << target << " from " << source;
        continue;
      }
      std::vector<uint16_t> bits(x.size());
      for (size_t i = 0; i < x.size(); ++i) bits[i] = CanonicalNan(LoadBytes<uint16_t>(codes.data() + 2 * i), x[i]);
      EXPECT_EQ(GoldenJson(ChunkHashes(bits, 1024)), expected) << target << " from " << source;
    }
  }
}

TEST(Exhaustive, EveryCodeDecodesAsMlDtypes) {
  const GoldenJson golden = Golden("exhaustive");
  for (const std::string target : {"fp8_e4m3", "fp8_e5m2", "bf16", "fp16"}) {
    const Format& format = Find(target);
    const size_t n = format.code_bits == 8 ? 256 : 65536;
    std::vector<uint8_t> codes(n * static_cast<size_t>(format.code_bits) / 8);
    for (size_t i = 0; i < n; ++i) {
      if (format.code_bits == 8) codes[i] = static_cast<uint8_t>(i);
      if (format.code_bits == 16) StoreBytes(codes.data() + 2 * i, static_cast<uint16_t>(i));
    }
    std::vector<float> x(n);
    format.decode_row({.codes = codes.data()}, static_cast<int>(n), 1.0F, x.data());
    EXPECT_EQ(ValueHashes(x, std::min<size_t>(n, 1024)), golden["fp32 from " + target]) << target;
  }
}

// A float below 8 bits, and the kernels' levels of it.
template <class Float, ElementType kElementType>
void CheckSubbyteFloat(const std::string& name) {
  const GoldenJson golden = Golden("exhaustive");
  constexpr int kCodes = 1 << CodeBits(kElementType);
  for (const std::string source : {"bf16", "fp16"}) {
    std::vector<uint8_t> codes;
    for (const float x : AllValues(source)) codes.push_back(Float::Encode(std::isnan(x) ? 0.0F : x));
    EXPECT_EQ(GoldenJson(ChunkHashes(codes, 1024)), golden[name + " from " + source]) << source;
  }
  std::vector<float> values;
  for (uint8_t code = 0; code < kCodes; ++code) values.push_back(Float::Decode(code));
  EXPECT_EQ(ValueHashes(values, kCodes), golden["fp32 from " + name]);
  uint8_t fields[64], codes[64];
  for (int i = 0; i < 64; ++i) fields[i] = static_cast<uint8_t>(i % kCodes);
  PackFields<kElementType>(fields, 64, codes);
  float decoded[64];
  DecodeLevels<kElementType>(codes, 64, decoded);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(decoded[i], values[static_cast<size_t>(i % kCodes)]) << name << " " << i;
}

TEST(Exhaustive, SubbyteFloatsEncodeAndDecodeAsMlDtypes) {
  CheckSubbyteFloat<E2m1, ElementType::kE2M1>("e2m1");
  CheckSubbyteFloat<E3m2, ElementType::kE3M2>("e3m2");
}

TEST(Exhaustive, PowerOfTwoScales) {
  const GoldenJson golden = Golden("exhaustive");
  std::vector<float> values;
  for (int byte = 0; byte < 256; ++byte) values.push_back(E8m0::Decode(static_cast<uint8_t>(byte)));
  EXPECT_EQ(ValueHashes(values, 256), golden["fp32 from e8m0"]);
  for (const std::string source : {"bf16", "fp16"}) {
    for (const std::string name : {"mxfp8", "mxfp6_e3m2", "mxfp4", "fp4_e2m1"}) {
      std::vector<uint8_t> scales;
      for (const float x : AllValues(source)) {
        float block[32] = {x};
        uint8_t codes[32];
        uint8_t scale[2];
        EncodeCounts counts;
        Find(name).encode_row(block, 32, 1.0F, {.codes = codes, .block_scales = scale}, counts);
        scales.push_back(scale[0]);
      }
      EXPECT_EQ(GoldenJson(ChunkHashes(scales, 1024)), golden[name + " scale from " + source]) << name;
    }
  }
}

}  // namespace
}  // namespace kvanta::formats
