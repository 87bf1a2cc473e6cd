// Codes to operands of tensor cores, in registers: the values of the formats, where the kernels look for them. The
// source is the GPU's, its instructions are emulated.
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

// Values of the channels in a row's bytes.
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

// A code, as a side of which the kernel knows all (kFixed), or the family.
template <ElementType kOf, bool kFixed>
struct Tested {
  static constexpr ElementType kElementType = kOf;
  static constexpr formats::Scaling kScaling = {
      .block = kOf == ElementType::kE2M1 || kOf == ElementType::kE3M2 ? formats::ScaleType::kE8M0
                                                                      : formats::ScaleType::kNone,
      .channels = kOf == ElementType::kE2M1 || kOf == ElementType::kE3M2 ? 32 : 0};
  using Side = std::conditional_t<kFixed, StaticKvType<Tested>, RuntimeKvType<DecodeKindOf(kOf)>>;
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

constexpr int kHeadDim = 96;  // three blocks; the lanes of one take parts of units of the narrowest plane

// Rows of tokens in the cache's layout, as the lanes load them.
struct LaidOut {
  static int Token(int token) { return token; }
  std::vector<uint8_t> bytes;
  Vec4 Codes4(int offset) const { return LoadAligned<Vec4>(bytes.data() + offset); }
  Vec2 Codes2(int offset) const { return LoadAligned<Vec2>(bytes.data() + offset); }
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
      // Of f32 only what three terms hold: the last one of tiny values would be subnormal, or less.
      for (size_t i = 3; kElementType == ElementType::kFp32 && i < row.size(); i += 4)
        row[i] = (row[i] & 0xbfU) | 0x30U;
      for (int byte = 0; byte < row_bytes; ++byte) {
        cell.bytes[static_cast<size_t>(formats::CodeOffset(kind, format, shape, token, byte))] =
            row[static_cast<size_t>(byte)];
      }
      values.push_back(Decode<kElementType>(row, kHeadDim));
    }
  }
  LaidOut cell;
  std::vector<std::vector<float>> values;  // [token][channel]
};

template <class Visit>
void ForFour(Visit visit) {
  visit(std::integral_constant<int, 0>{});
  visit(std::integral_constant<int, 1>{});
  visit(std::integral_constant<int, 2>{});
  visit(std::integral_constant<int, 3>{});
}

TYPED_TEST(GpuCodesTest, KeysOfALane) {
  using Side = typename TypeParam::Side;
  using Operand = KeyOperand<Side>;
  constexpr ElementType kElementType = TypeParam::kElementType;
  const KvTypeDesc code = MakeKvTypeDesc(kElementType, TypeParam::kScaling);
  const Side side(code);
  for (uint32_t seed = 0; seed < 16; ++seed) {
    const Rows<kElementType> rows(formats::SideKind::kK, 32, seed);
    for (int block = 0; block < kHeadDim / 32; ++block) {
      for (int lane = 0; lane < kWarp; ++lane) {
        const int g = lane / 4, t = lane % 4;
        typename Operand::Words words;
        Operand::Load(side, rows.cell, kHeadDim, block, t,
                      g / 4 * 2 * kHeadDim * formats::CodeBits(kElementType) + g % 4 * 16, words);
        for (int j = 0; j < 4; ++j) {
          ForFour([&](auto pair) {
            constexpr int kPair = decltype(pair)::value;
            for (int half = 0; half < 2; ++half) {
              const int channel = 32 * block + Operand::Channel(kPair, half, t);
              const float expected = rows.values[static_cast<size_t>(4 * g + j)][static_cast<size_t>(channel)];
              float found = 0;
              for (int term = 0; term < Side::kCodeTerms; ++term) {
                found += Half(Operand::template Pair<kPair>(side, words, j, t, term), half, Side::kBf16);
              }
              ASSERT_TRUE(Same(found * code.unit, expected)) << "token " << 4 * g + j << " channel " << channel;
            }
          });
        }
      }
    }
  }
}

TYPED_TEST(GpuCodesTest, ValuesOfALane) {
  using Side = typename TypeParam::Side;
  using Operand = ValueOperand<Side>;
  constexpr ElementType kElementType = TypeParam::kElementType;
  if constexpr (DecodeKindOf(kElementType) != DecodeKind::kLloyd) {  // keys only
    const KvTypeDesc code = MakeKvTypeDesc(kElementType, TypeParam::kScaling);
    const Side side(code);
    for (uint32_t seed = 0; seed < 16; ++seed) {
      const Rows<kElementType> rows(formats::SideKind::kV, 32, seed);
      for (int block = 0; block < kHeadDim / 32; ++block) {
        for (int lane = 0; lane < kWarp; ++lane) {
          const int g = lane / 4, t = lane % 4;
          typename Operand::Words words;
          Operand::Load(side, rows.cell, kHeadDim, block, lane, words);
          ForFour([&](auto index) {
            constexpr int kChannel = decltype(index)::value;
            const int channel = 32 * block + 4 * g + kChannel;
            float found[8] = {};
            for (int term = 0; term < Side::kCodeTerms; ++term) {
              uint32_t pairs[4];
              Operand::template Pairs<kChannel>(side, words, g, term, pairs);
              for (int token = 0; token < 8; ++token) found[token] += Half(pairs[token % 4], token / 4, Side::kBf16);
            }
            for (int token = 0; token < 8; ++token) {
              const float expected = rows.values[static_cast<size_t>(8 * t + token)][static_cast<size_t>(channel)];
              ASSERT_TRUE(Same(found[token] * code.unit, expected))
                  << "token " << 8 * t + token << " channel " << channel;
            }
          });
        }
      }
    }
  }
}

// GPUs before sm_89 have no instruction for it.
TEST(GpuCodesTest, E4m3InSteps) {
  for (uint32_t bytes = 0; bytes < 0x10000; ++bytes) {
    const uint32_t found = E4m3ToF16InSteps(bytes);
    for (int half = 0; half < 2; ++half) {
      ASSERT_TRUE(Same(Half(found, half), Half(E4m3ToF16(bytes), half))) << std::hex << bytes;
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels::cuda
