// Trellis codes as tensor-core operands (formats/trellis.h, formats/klt.h): windows of 8 bits over a row's string of
// codes are indices into a table of levels, f16 in shared memory. Include the primitives first.
//
// Lanes have the tokens and channels of codes.h: 8 channels of a key, whose windows are of up to 36 bits, or 4 channels
// of values, whose windows are of up to 3 bytes that 4 tokens have side by side.
#pragma once

#include <cstdint>

#include "formats/bit_allocation.h"
#include "formats/klt_group.h"
#include "formats/trellis_levels.h"
#include "kernels/attention/cuda/codes.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLevelTableBytes = 2 * 256;  // f16
inline constexpr int kLevelWidths = formats::kMaxAllocatedBits + 1;

// Levels of a side in shared memory: tables, and of bits that differ by channel a word for each 8 channels, BlockCodes.
// Of token groups with bits of their own each warp has the words and the channels' scales of the one that it reads.
struct SharedLevels {
  static constexpr KVANTA_DEVICE int Tables(DecodeKind decode) {
    return decode == DecodeKind::kTrellis ? 1 : decode == DecodeKind::kKlt ? kLevelWidths : 0;
  }
  static constexpr KVANTA_DEVICE int Bytes(const KvTypeDesc& desc, int head_dim) {
    const int words = desc.decode == DecodeKind::kKlt ? head_dim / 8 * 4 : 0;
    return Tables(desc.decode) * kLevelTableBytes +
           (desc.scaling.channel_bits ? kAttendWarps * GroupBytes(head_dim) : words);
  }

  // Loads them by threads [0, count). allocation: of the KV head, or null: not words. Needs a block barrier after it.
  static KVANTA_DEVICE void Load(DecodeKind decode, const formats::TrellisLevelTable* tables,
                                 const formats::BitAllocation* allocation, int to, int thread, int count) {
    for (int i = thread; i < Tables(decode) * 256; i += count) {
      const float level = tables[i / 256].levels[i % 256];
      StoreShared(to + 2 * i, static_cast<uint16_t>(PackF16(level, 0)));
    }
    if (allocation == nullptr) return;
    for (int block = thread; block < allocation->head_dim / formats::kAllocationBlock; block += count) {
      uint32_t byte = 0;
      uint32_t string_begin = 0;
      for (int i = 0; i < block; ++i) byte += allocation->bits[i];
      for (int i = 0; i < allocation->scalar_blocks; ++i) string_begin += allocation->bits[i];
      const uint32_t bits = allocation->bits[block];
      const uint32_t next = block + 1 < allocation->coded_blocks ? byte + bits : string_begin;
      StoreShared(Words(to) + 4 * block, WordOf(bits, byte, next));
    }
  }

  // Loads a token group's words and scales to the calling warp's part, from its section. tables: as above. Needs a warp
  // barrier before and after it.
  static KVANTA_DEVICE void LoadGroup(const uint8_t* section, const formats::TrellisLevelTable* tables, int head_dim,
                                      int mean_bits, int to, int lane) {
    const int blocks = head_dim / formats::kAllocationBlock;
    const auto nibble = [section](int i) { return section[i / 2] >> static_cast<unsigned>(4 * (i % 2)) & 15; };
    int all_bits = 0, string_begin = 0;
    bool valid = true;
    for (int block = 0; block < blocks; ++block) {
      const int bits = nibble(head_dim + block);
      valid = valid && bits <= formats::kMaxAllocatedBits;
      all_bits += bits;
      if (bits > formats::kMaxAllocatedTrellis) string_begin += bits;
    }
    valid = valid && all_bits == mean_bits * blocks;
    for (int block = lane; block < blocks; block += kWarp) {
      const int bits = valid ? nibble(head_dim + block) : 0;
      int byte = 0;
      for (int i = 0; i < blocks; ++i) {
        const int other = nibble(head_dim + i);
        if (other > bits || (other == bits && i < block)) byte += other;
      }
      const int next = byte + bits == all_bits ? string_begin : byte + bits;
      const uint32_t word =
          WordOf(static_cast<uint32_t>(bits), static_cast<uint32_t>(byte), static_cast<uint32_t>(next));
      StoreShared(GroupWords(to, head_dim) + 4 * block, bits == 0 ? 0U : word);
      const int first = block * formats::kAllocationBlock;
      const auto scale = [&](int i) { return formats::ScaleOfLevel(nibble(first + i), tables[bits].rms); };
      for (int i = 0; i < formats::kAllocationBlock; i += 2) {
        StoreShared(GroupScales(to, head_dim) + 2 * (first + i), PackF16(scale(i), scale(i + 1)));
      }
    }
  }

  // Offsets of a side's words, and of a group's scales, f16 [head_dim], and words.
  static constexpr KVANTA_DEVICE int Words(int levels) { return levels + kLevelWidths * kLevelTableBytes; }
  static KVANTA_DEVICE int GroupScales(int levels, int head_dim) {
    return Words(levels) + ThreadIndex() / kWarp * GroupBytes(head_dim);
  }
  static KVANTA_DEVICE int GroupWords(int levels, int head_dim) { return GroupScales(levels, head_dim) + 2 * head_dim; }

 private:
  static constexpr KVANTA_DEVICE int GroupBytes(int head_dim) {  // of a warp
    return (2 * head_dim + head_dim / 8 * 4 + 15) / 16 * 16;
  }
  static KVANTA_DEVICE uint32_t WordOf(uint32_t bits, uint32_t byte, uint32_t next) {
    return bits | byte << 4U | next << 18U;
  }
};

// The codes of 8 channels of a row: `byte` is the first one's, `next` the byte that the last windows go on with.
struct BlockCodes {
  int bits;
  int byte;
  int next;
};

// Levels at index `shift` of a string's windows, from an own and the following 32 bits.
KVANTA_DEVICE uint32_t LevelAt(int table, uint32_t low, uint32_t high, int shift) {
  const uint64_t string = low | uint64_t{high} << 32U;
  const uint64_t doubled = shift == 0 ? string << 1U : string >> static_cast<unsigned>(shift - 1);
  return LoadShared<uint16_t>(table + static_cast<int>(static_cast<uint32_t>(doubled) & 0x1feU));
}

template <class KvType>
requires KvType::kTrellis struct KeyOperand<KvType> {
  static constexpr int kLoads = 1;
  static constexpr bool kUneven = KvType::kDecodeKind == DecodeKind::kKlt;
  struct Raw {
    Vec4 low, high;  // the string from the lane's channels on, by token
    int bits;
    int table;
  };

  static KVANTA_DEVICE int Channel(int pair, int half, int t) { return 8 * t + pair + 4 * half; }

  template <class Cell>
  static KVANTA_DEVICE void Load(const KvType& type, const Cell& cell, int head_dim, int block, int t, int lane_line,
                                 Raw& raw) {
    raw = {};
    raw.table = type.levels;
    const int octet = 4 * block + t;
    if (8 * octet >= head_dim) return;
    const BlockCodes codes = CodesOf(type, head_dim, octet);
    const int units = head_dim * type.LowBits() / 32;
    const auto load = [&](int unit) { return cell.Codes4(lane_line + unit * 64, 0); };
    const auto clamped = [&](int unit) { return load(unit < units ? unit : units - 1); };
    const int unit = codes.byte / 4;
    const auto shift = static_cast<unsigned>(8 * (codes.byte % 4));
    raw.bits = codes.bits;
    const Vec4 first = load(unit);
    if constexpr (kUneven) {
      raw.table += codes.bits * kLevelTableBytes;
      const Vec4 second = clamped(unit + 1);
      const Vec4 third = codes.bits > formats::kMaxAllocatedTrellis ? clamped(unit + 2) : Vec4{};
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        raw.low.word[j] = Funnel(first.word[j], second.word[j], shift);
        raw.high.word[j] = Funnel(second.word[j], third.word[j], shift);
      }
      if (codes.next == codes.byte + codes.bits || codes.bits > formats::kMaxAllocatedTrellis) return;
      const Vec4 next = load(codes.next / 4);  // the string's last codes: it is circular
      const auto at = static_cast<unsigned>(8 * codes.bits);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t byte = next.word[j] >> static_cast<unsigned>(8 * (codes.next % 4)) & 0xffU;
        if (at == 32) {
          raw.high.word[j] = byte;
        } else {
          raw.low.word[j] = (raw.low.word[j] & ~(0xffU << at)) | byte << at;
        }
      }
    } else {
      const Vec4 second = load(unit + 1 < units ? unit + 1 : 0);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        raw.low.word[j] = Funnel(first.word[j], second.word[j], shift);
        raw.high.word[j] = second.word[j];  // of 4 bits: the shift is 0
      }
    }
  }

  template <int kPair>
  static KVANTA_DEVICE uint32_t Pair(const KvType& type, const Raw& raw, int j, int /*t*/, int /*term*/) {
    const int bits = kUneven ? raw.bits : type.LowBits();
    const auto level = [&](int channel) {
      return LevelAt(raw.table, raw.low.word[j], raw.high.word[j], bits * channel);
    };
    return level(kPair) | level(kPair + 4) << 16U;
  }

 private:
  static KVANTA_DEVICE BlockCodes CodesOf(const KvType& type, int head_dim, int octet) {
    if constexpr (kUneven) {
      const int words =
          type.HasChannelBits() ? SharedLevels::GroupWords(type.levels, head_dim) : SharedLevels::Words(type.levels);
      const auto word = LoadShared<uint32_t>(words + 4 * octet);
      return {static_cast<int>(word & 15U), static_cast<int>(word >> 4U & 0x3fffU), static_cast<int>(word >> 18U)};
    } else {
      return {type.LowBits(), octet * type.LowBits(), 0};
    }
  }
  static KVANTA_DEVICE uint32_t Funnel(uint32_t low, uint32_t high, unsigned shift) {
    return static_cast<uint32_t>((low | uint64_t{high} << 32U) >> shift);
  }
};

template <class KvType>
requires KvType::kTrellis struct ValueOperand<KvType> {
  static constexpr int kPlanes = 3;
  struct Raw {
    uint32_t bytes[2][kPlanes];  // bytes of the string from the lane's channels on, of tokens 0 to 3 and 4 to 7
    int levels;
  };

  template <class Cell>
  static KVANTA_DEVICE void Load(const KvType& type, const Cell& cell, int head_dim, int block, int lane, Raw& raw) {
    const int channel = 32 * block + lane / 4 * 4;
    raw = {};
    raw.levels = type.levels;
    if (channel >= head_dim) return;
    const int bits = type.LowBits();
    const int row_bytes = head_dim * bits / 8;
    const int line = 4 * row_bytes;  // bytes of 4 tokens
    const int first = cell.WrapToken(lane % 4 * 8) / 4 * line;
    KVANTA_UNROLL
    for (int plane = 0; plane < kPlanes; ++plane) {
      if (plane == 2 && bits == 2) break;
      int byte = channel * bits / 8 + plane;
      if (byte >= row_bytes) byte -= row_bytes;
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) raw.bytes[i][plane] = cell.Codes1(first + 4 * byte, i * line);
    }
    if (bits == 3 && channel % 8 != 0) {  // the codes begin in the middle of a byte
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) {
        raw.bytes[i][0] = Windows(raw.bytes[i][0], raw.bytes[i][1], 4);
        raw.bytes[i][1] = Windows(raw.bytes[i][1], raw.bytes[i][2], 4);
        raw.bytes[i][2] = raw.bytes[i][2] >> 4U & 0x0f0f0f0fU;
      }
    }
  }

  template <int kChannel>
  static KVANTA_DEVICE void Pairs(const KvType& type, const Raw& raw, int /*g*/, int /*term*/, uint32_t (&pairs)[4]) {
    const int shift = type.LowBits() * kChannel;
    uint32_t windows[2];
    KVANTA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto& bytes = raw.bytes[i];
      windows[i] = shift < 8 ? Windows(bytes[0], bytes[1], shift) : Windows(bytes[1], bytes[2], shift - 8);
    }
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      pairs[j] = LevelAt(raw.levels, windows[0], 0, 8 * j) | LevelAt(raw.levels, windows[1], 0, 8 * j) << 16U;
    }
  }

 private:
  // Bits [shift, shift + 8) of the 16 that each byte of `low` and `high` are, shift below 8.
  static KVANTA_DEVICE uint32_t Windows(uint32_t low, uint32_t high, int shift) {
    const auto right = static_cast<unsigned>(shift);
    const uint32_t mask = (0xffU >> right) * 0x01010101U;
    return (low >> right & mask) | (high << (8U - right) & ~mask);
  }
};

}  // namespace kvanta::kernels::cuda
