#include "weights/block_format.h"

#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "formats/minifloat.h"

namespace kvanta::weights {
namespace {

float ReadFp16(const uint8_t* bytes) noexcept {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return Fp16ToFloat(bits);
}

uint32_t ReadWord(const uint8_t* bytes) noexcept {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// Blocks of 32: one scale, and an offset or none.
void SetScales(float scale, float offset, UnpackedBlock& block) noexcept {
  block.scale = scale;
  block.offset = offset;
  for (int sub = 0; sub < 2; ++sub) block.sub_scales[sub] = block.sub_offsets[sub] = 1;
}

// 4 bits each of `n` weights: byte i holds the weights i and i + n / 2, low half first.
void UnpackNibbles(const uint8_t* bytes, int n, int8_t* codes) noexcept {
  for (int i = 0; i < n / 2; ++i) {
    codes[i] = static_cast<int8_t>(bytes[i] & 15);
    codes[i + n / 2] = static_cast<int8_t>(bytes[i] >> 4);
  }
}

void Add(int value, int n, int8_t* codes) noexcept {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(codes[i] + value);
}

void LookUp(const int8_t* values, int n, int8_t* codes) noexcept {
  for (int i = 0; i < n; ++i) codes[i] = values[codes[i]];
}

// fp16 scale | int8 [32]
void UnpackQ8Of0(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  SetScales(ReadFp16(bytes), 0, block);
  std::memcpy(block.codes, bytes + 2, 32);
}

// fp16 scale | u4 [32], code - 8
void UnpackQ4Of0(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  SetScales(ReadFp16(bytes), 0, block);
  UnpackNibbles(bytes + 2, 32, block.codes);
  Add(-8, 32, block.codes);
}

// fp16 scale | fp16 offset | u4 [32]
void UnpackQ4Of1(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  SetScales(ReadFp16(bytes), ReadFp16(bytes + 2), block);
  UnpackNibbles(bytes + 4, 32, block.codes);
}

// Bit i of `high` is the fifth bit of code i.
void AddFifthBits(uint32_t high, int8_t* codes) noexcept {
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(codes[i] | ((high >> i & 1U) << 4));
}

// fp16 scale | fifth bits [4] | u4 [32], code - 16
void UnpackQ5Of0(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  SetScales(ReadFp16(bytes), 0, block);
  UnpackNibbles(bytes + 6, 32, block.codes);
  AddFifthBits(ReadWord(bytes + 2), block.codes);
  Add(-16, 32, block.codes);
}

// fp16 scale | fp16 offset | fifth bits [4] | u4 [32]
void UnpackQ5Of1(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  SetScales(ReadFp16(bytes), ReadFp16(bytes + 2), block);
  UnpackNibbles(bytes + 8, 32, block.codes);
  AddFifthBits(ReadWord(bytes + 4), block.codes);
}

// 2-bit fields of K-quants: byte 32 h + i holds the weights 128 h + i + {0, 32, 64, 96}, lowest bits first.
void UnpackTwoBits(const uint8_t* bytes, int8_t* codes) noexcept {
  for (int half = 0; half < 2; ++half) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        codes[128 * half + 32 * quarter + i] = static_cast<int8_t>(bytes[32 * half + i] >> (2 * quarter) & 3);
      }
    }
  }
}

// (u4 scale, u4 offset) [16] | u2 [256] | fp16 scale | fp16 offset, which is subtracted
void UnpackQ2K(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  block.scale = ReadFp16(bytes + 80);
  block.offset = -ReadFp16(bytes + 82);
  for (int sub = 0; sub < 16; ++sub) {
    block.sub_scales[sub] = static_cast<float>(bytes[sub] & 15);
    block.sub_offsets[sub] = static_cast<float>(bytes[sub] >> 4);
  }
  UnpackTwoBits(bytes + 16, block.codes);
}

// third bits [32] | u2 [256] | 6-bit scales [16], scale - 32 | fp16 scale. A weight without its third bit is 4 less.
void UnpackQ3K(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  block.scale = ReadFp16(bytes + 108);
  const uint8_t* scales = bytes + 96;
  for (int sub = 0; sub < 16; ++sub) {
    const int low = sub < 8 ? scales[sub] & 15 : scales[sub - 8] >> 4;
    const int high = scales[8 + sub % 4] >> (2 * (sub / 4)) & 3;
    block.sub_scales[sub] = static_cast<float>((low | high << 4) - 32);
  }
  UnpackTwoBits(bytes + 32, block.codes);
  for (int eighth = 0; eighth < 8; ++eighth) {
    for (int i = 0; i < 32; ++i) {
      int8_t& code = block.codes[32 * eighth + i];
      code = static_cast<int8_t>(code - ((bytes[i] >> eighth & 1) != 0 ? 0 : 4));
    }
  }
}

// 6-bit scales and offsets of Q4_K and Q5_K, [12] bytes: those of sub-blocks 0 to 3 in the low bits of bytes 0 to 7,
// the others in halves of bytes 8 to 11 and the highest bits of bytes 0 to 7.
void UnpackScalesAndOffsets(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  block.scale = ReadFp16(bytes);
  block.offset = -ReadFp16(bytes + 2);
  const uint8_t* q = bytes + 4;
  for (int sub = 0; sub < 8; ++sub) {
    const int scale = sub < 4 ? q[sub] & 63 : (q[sub + 4] & 15) | (q[sub - 4] >> 6) << 4;
    const int offset = sub < 4 ? q[sub + 4] & 63 : (q[sub + 4] >> 4) | (q[sub] >> 6) << 4;
    block.sub_scales[2 * sub] = block.sub_scales[2 * sub + 1] = static_cast<float>(scale);
    block.sub_offsets[2 * sub] = block.sub_offsets[2 * sub + 1] = static_cast<float>(offset);
  }
}

// fp16 scale | fp16 offset, subtracted | 6-bit scales and offsets [8] | u4 [256] in four groups of 64
void UnpackQ4K(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  UnpackScalesAndOffsets(bytes, block);
  for (int group = 0; group < 4; ++group) UnpackNibbles(bytes + 16 + 32 * group, 64, block.codes + 64 * group);
}

// As Q4_K, with the fifth bits [32] before the codes: bit g of byte i belongs to weight 32 g + i.
void UnpackQ5K(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  UnpackScalesAndOffsets(bytes, block);
  for (int group = 0; group < 4; ++group) UnpackNibbles(bytes + 48 + 32 * group, 64, block.codes + 64 * group);
  for (int group = 0; group < 8; ++group) {
    for (int i = 0; i < 32; ++i) {
      int8_t& code = block.codes[32 * group + i];
      code = static_cast<int8_t>(code | (bytes[16 + i] >> group & 1) << 4);
    }
  }
}

// u4 [256] in two groups of 128 | highest two bits [256] | int8 scales [16] | fp16 scale; code - 32
void UnpackQ6K(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  block.scale = ReadFp16(bytes + 208);
  for (int sub = 0; sub < 16; ++sub) {
    block.sub_scales[sub] = static_cast<float>(static_cast<int8_t>(bytes[192 + sub]));
  }
  int8_t high[kMaxBlockWeights];
  UnpackTwoBits(bytes + 128, high);
  for (int group = 0; group < 2; ++group) UnpackNibbles(bytes + 64 * group, 128, block.codes + 128 * group);
  for (int i = 0; i < kMaxBlockWeights; ++i) {
    block.codes[i] = static_cast<int8_t>((block.codes[i] | high[i] << 4) - 32);
  }
}

// fp16 scale | u4 [32], indices of kIq4Values
void UnpackIq4Nl(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  SetScales(ReadFp16(bytes), 0, block);
  UnpackNibbles(bytes + 2, 32, block.codes);
  LookUp(kIq4Values, 32, block.codes);
}

// fp16 scale | highest two bits of scales [8] | lowest four bits [8] | u4 [256] in eight groups of 32; scale - 32
void UnpackIq4Xs(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  block.scale = ReadFp16(bytes);
  const int highs = bytes[2] | bytes[3] << 8;
  for (int group = 0; group < 8; ++group) {
    const int scale = (bytes[4 + group / 2] >> (4 * (group % 2)) & 15) | (highs >> (2 * group) & 3) << 4;
    block.sub_scales[2 * group] = block.sub_scales[2 * group + 1] = static_cast<float>(scale - 32);
    UnpackNibbles(bytes + 8 + 16 * group, 32, block.codes + 32 * group);
  }
  LookUp(kIq4Values, kMaxBlockWeights, block.codes);
}

// E8M0 scale | E2M1 [32]
void UnpackMxfp4(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  // 2^(e - 127), halved because the values are doubled; 255 is NaN.
  SetScales(bytes[0] == 255 ? NAN : std::ldexp(1.0F, bytes[0] - 128), 0, block);
  UnpackNibbles(bytes + 1, 32, block.codes);
  LookUp(kE2m1Values, 32, block.codes);
}

// E4M3 scales [4], unsigned | E2M1 [64] in four groups of 16
void UnpackNvfp4(const uint8_t* bytes, UnpackedBlock& block) noexcept {
  block.scale = 0.5F;  // the values are doubled
  for (int sub = 0; sub < 4; ++sub) {
    block.sub_scales[sub] = formats::E4m3::Decode(bytes[sub] & 127);
    UnpackNibbles(bytes + 4 + 8 * sub, 16, block.codes + 16 * sub);
  }
  LookUp(kE2m1Values, 64, block.codes);
}

constexpr BlockFormatInfo kInfos[kBlockFormats] = {
    {"none", 1, 0, nullptr},           {"Q8_0", 32, 34, UnpackQ8Of0},  {"Q4_0", 32, 18, UnpackQ4Of0},
    {"Q4_1", 32, 20, UnpackQ4Of1},     {"Q5_0", 32, 22, UnpackQ5Of0},  {"Q5_1", 32, 24, UnpackQ5Of1},
    {"Q2_K", 256, 84, UnpackQ2K},      {"Q3_K", 256, 110, UnpackQ3K},  {"Q4_K", 256, 144, UnpackQ4K},
    {"Q5_K", 256, 176, UnpackQ5K},     {"Q6_K", 256, 210, UnpackQ6K},  {"IQ4_NL", 32, 18, UnpackIq4Nl},
    {"IQ4_XS", 256, 136, UnpackIq4Xs}, {"MXFP4", 32, 17, UnpackMxfp4}, {"NVFP4", 64, 36, UnpackNvfp4},
};

}  // namespace

const BlockFormatInfo& Info(BlockFormat format) noexcept {
  return kInfos[static_cast<int>(format)];
}

BlockFormat FindBlockFormat(std::string_view name) noexcept {
  for (int i = 1; i < kBlockFormats; ++i) {
    if (kInfos[i].name == name) return static_cast<BlockFormat>(i);
  }
  return BlockFormat::kNone;
}

void DequantizeBlocks(const uint8_t* row, BlockFormat format, int64_t in, float* out) noexcept {
  const BlockFormatInfo& info = Info(format);
  for (int64_t begin = 0; begin < in; begin += info.weights, row += info.bytes) {
    UnpackedBlock block;
    info.unpack(row, block);
    for (int i = 0; i < info.weights; ++i) {
      const int sub = i / kSubBlockWeights;
      out[begin + i] = block.scale * block.sub_scales[sub] * static_cast<float>(block.codes[i]) +
                       block.offset * block.sub_offsets[sub];
    }
  }
}

}  // namespace kvanta::weights
