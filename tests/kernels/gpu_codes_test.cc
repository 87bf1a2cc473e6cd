// Decoding of codes to tensor-core operands: the formats' values at the positions that the kernels use. Runs the
// kernels' source with emulated instructions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "emulated/cuda_primitives.h"
// Primitives first.
#include "formats/bit_planes.h"
#include "formats/cell_layout.h"
#include "kernels/attention/cuda/codes.h"

namespace kvanta::kernels::cuda {
namespace {

// Decodes a row's codes.
template <ElementType kElementType>
std::vector<float> Decode(const std::vector<uint8_t>& row, int channels) {
  std::vector<float> values(static_cast<size_t>(channels));
  for (int c = 0; c < channels; ++c) {
    const auto at = static_cast<size_t>(c);
    const auto half = [&] { return static_cast<uint16_t>(row[2 * at] | (row[2 * at + 1] << 8)); };
    if constexpr (kElementType == ElementType::kBf16) values[at] = Bf16ToFloat(half());
    if constexpr (kElementType == ElementType::kFp16) values[at] = Fp16ToFloat(half());
    if constexpr (kElementType == ElementType::kE4M3) values[at] = formats::E4m3::Decode(row[at]);
    if constexpr (kElementType == ElementType::kE5M2) values[at] = formats::E5m2::Decode(row[at]);
    if constexpr (kElementType == ElementType::kFp32) std::memcpy(&values[at], row.data() + 4 * at, 4);
    if constexpr (kElementType == ElementType::kInt8) values[at] = static_cast<float>(static_cast<int8_t>(row[at]));
  }
  if constexpr (formats::CodeBits(kElementType) < 8)
    formats::DecodeLevels<kElementType>(row.data(), channels, values.data());
  return values;
}

bool Same(float found, float expected) {
  return found == expected || (std::isnan(found) && std::isnan(expected));
}

float Half(uint32_t pair, int half, bool bf16 = false) {
  const auto bits = static_cast<uint16_t>(pair >> static_cast<unsigned>(16 * half));
  return bf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

// A K/V type of one element type, at compile time (kStatic) or run time.
template <ElementType kType, bool kStatic>
struct Tested {
  static constexpr ElementType kElementType = kType;
  static constexpr formats::Scaling kScaling = {
      .block = kType == ElementType::kE2M1 || kType == ElementType::kE3M2 ? formats::ScaleType::kE8M0
                                                                          : formats::ScaleType::kNone,
      .channels = kType == ElementType::kE2M1 || kType == ElementType::kE3M2 ? 32 : 0};
  using KvType = std::conditional_t<kStatic, StaticKvType<Tested>, RuntimeKvType<DecodeKindOf(kType)>>;
};

template <class T>
class GpuCodesTest : public ::testing::Test {};
using Codes = ::testing::Types<
    Tested<ElementType::kFp32, false>, Tested<ElementType::kBf16, true>, Tested<ElementType::kFp16, false>,
    Tested<ElementType::kE4M3, true>, Tested<ElementType::kE5M2, false>, Tested<ElementType::kInt8, true>,
    Tested<ElementType::kInt6, false>, Tested<ElementType::kInt5, false>, Tested<ElementType::kInt4, true>,
    Tested<ElementType::kInt4, false>, Tested<ElementType::kUint4, true>, Tested<ElementType::kInt3, false>,
    Tested<ElementType::kInt3, true>, Tested<ElementType::kInt2, false>, Tested<ElementType::kUint3, false>,
    Tested<ElementType::kUint2, false>, Tested<ElementType::kE2M1, true>, Tested<ElementType::kE3M2, false>,
    Tested<ElementType::kE3M2, true>, Tested<ElementType::kLloyd4, false>, Tested<ElementType::kLloyd3, false>>;
TYPED_TEST_SUITE(GpuCodesTest, Codes);

constexpr int kHeadDim = 96;  // three blocks; lanes share units of the narrowest section

// A cell in the cache layout, with the kernels' load interface.
struct TestCell {
  static int WrapToken(int token) { return token; }
  std::vector<uint8_t> bytes;
  Vec4 Codes4(int of_lane, int of_warp) const { return LoadAligned<Vec4>(bytes.data() + of_lane + of_warp); }
  Vec2 Codes2(int of_lane, int of_warp) const { return LoadAligned<Vec2>(bytes.data() + of_lane + of_warp); }
};
template <ElementType kElementType>
struct Rows {
  Rows(formats::SideKind kind, int tokens, uint32_t seed) {
    std::mt19937 random(seed);
    const int row_bytes = kHeadDim * formats::CodeBits(kElementType) / 8;
    formats::Format format = formats::Find("bf16");
    format.code_bits = formats::CodeBits(kElementType);
    const formats::CellShape shape{.tokens = 32, .head_dim = kHeadDim};
    cell.bytes.resize(static_cast<size_t>(32 * row_bytes));
    for (int token = 0; token < tokens; ++token) {
      std::vector<uint8_t> row(static_cast<size_t>(row_bytes));
      for (uint8_t& byte : row) byte = static_cast<uint8_t>(random());
      // f32 in the range that three terms represent: the last term of smaller values would be subnormal.
      for (size_t i = 3; kElementType == ElementType::kFp32 && i < row.size(); i += 4)
        row[i] = (row[i] & 0xbfU) | 0x30U;
      for (int byte = 0; byte < row_bytes; ++byte) {
        cell.bytes[static_cast<size_t>(formats::CodeOffset(kind, format, shape, token, byte))] =
            row[static_cast<size_t>(byte)];
      }
      values.push_back(Decode<kElementType>(row, kHeadDim));
    }
  }
  TestCell cell;
  std::vector<std::vector<float>> values;  // [token][channel]
};

template <class Visit>
void ForFour(Visit visit) {
  visit(std::integral_constant<int, 0>{});
  visit(std::integral_constant<int, 1>{});
  visit(std::integral_constant<int, 2>{});
  visit(std::integral_constant<int, 3>{});
}

TYPED_TEST(GpuCodesTest, KeyOperandsHoldTheValues) {
  using KvType = typename TypeParam::KvType;
  using Operand = KeyOperand<KvType>;
  constexpr ElementType kElementType = TypeParam::kElementType;
  const KvTypeDesc desc = MakeKvTypeDesc(kElementType, TypeParam::kScaling);
  const KvType type(desc);
  for (uint32_t seed = 0; seed < 16; ++seed) {
    const Rows<kElementType> rows(formats::SideKind::kK, 32, seed);
    for (int block = 0; block < kHeadDim / 32; ++block) {
      for (int lane = 0; lane < kWarp; ++lane) {
        const int g = lane / 4, t = lane % 4;
        typename Operand::Raw raw;
        Operand::Load(type, rows.cell, kHeadDim, block, t,
                      g / 4 * 2 * kHeadDim * formats::CodeBits(kElementType) + g % 4 * 16, raw);
        for (int j = 0; j < 4; ++j) {
          ForFour([&](auto pair) {
            constexpr int kPair = decltype(pair)::value;
            for (int half = 0; half < 2; ++half) {
              const int channel = 32 * block + Operand::Channel(kPair, half, t);
              const float expected = rows.values[static_cast<size_t>(4 * g + j)][static_cast<size_t>(channel)];
              float found = 0;
              for (int term = 0; term < KvType::kCodeTerms; ++term) {
                found += Half(Operand::template Pair<kPair>(type, raw, j, t, term), half, KvType::kBf16);
              }
              ASSERT_TRUE(Same(found * desc.unit, expected)) << "token " << 4 * g + j << " channel " << channel;
            }
          });
        }
      }
    }
  }
}

TYPED_TEST(GpuCodesTest, ValueOperandsHoldTheValues) {
  using KvType = typename TypeParam::KvType;
  using Operand = ValueOperand<KvType>;
  constexpr ElementType kElementType = TypeParam::kElementType;
  if constexpr (DecodeKindOf(kElementType) != DecodeKind::kLloyd) {  // Lloyd-Max codes are for keys only
    const KvTypeDesc desc = MakeKvTypeDesc(kElementType, TypeParam::kScaling);
    const KvType type(desc);
    for (uint32_t seed = 0; seed < 16; ++seed) {
      const Rows<kElementType> rows(formats::SideKind::kV, 32, seed);
      for (int block = 0; block < kHeadDim / 32; ++block) {
        for (int lane = 0; lane < kWarp; ++lane) {
          const int g = lane / 4, t = lane % 4;
          typename Operand::Raw raw;
          Operand::Load(type, rows.cell, kHeadDim, block, lane, raw);
          ForFour([&](auto index) {
            constexpr int kChannel = decltype(index)::value;
            const int channel = 32 * block + 4 * g + kChannel;
            float found[8] = {};
            for (int term = 0; term < KvType::kCodeTerms; ++term) {
              uint32_t pairs[4];
              Operand::template Pairs<kChannel>(type, raw, g, term, pairs);
              for (int token = 0; token < 8; ++token) found[token] += Half(pairs[token % 4], token / 4, KvType::kBf16);
            }
            for (int token = 0; token < 8; ++token) {
              const float expected = rows.values[static_cast<size_t>(8 * t + token)][static_cast<size_t>(channel)];
              ASSERT_TRUE(Same(found[token] * desc.unit, expected))
                  << "token " << 8 * t + token << " channel " << channel;
            }
          });
        }
      }
    }
  }
}

// Used on GPUs before sm_89.
TEST(GpuCodesTest, EmulatedE4m3ConversionIsExact) {
  for (uint32_t bytes = 0; bytes < 0x10000; ++bytes) {
    const uint32_t found = E4m3ToF16Emulated(bytes);
    for (int half = 0; half < 2; ++half) {
      ASSERT_TRUE(Same(Half(found, half), Half(E4m3ToF16(bytes), half))) << std::hex << bytes;
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels::cuda
