// Rows of codes below 8 bits as bit planes (the order of fields: formats/element_type.h), and their levels.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "formats/element_type.h"
#include "formats/minifloat.h"

namespace kvanta::formats {

// Packs bits [shift, shift + kBits) of fields[n] into a plane of kBits bits; n a multiple of 32 / kBits.
template <int kBits>
KVANTA_HD void PackPlane(const uint8_t* fields, int n, int shift, uint8_t* section) noexcept {
  constexpr int kFields = 8 / kBits;  // fields per byte
  constexpr unsigned kMask = (1U << kBits) - 1U;
  for (int begin = 0; begin < n; begin += 4 * kFields) {
    for (int byte = 0; byte < 4; ++byte) {
      unsigned packed = 0;
      for (int i = 0; i < kFields; ++i) {
        const unsigned field = fields[begin + 8 * (i / 2) + 2 * byte + i % 2];
        packed |= ((field >> static_cast<unsigned>(shift)) & kMask) << static_cast<unsigned>(kBits * i);
      }
      *section++ = static_cast<uint8_t>(packed);
    }
  }
}

// Adds the plane's bits to fields[n] at `shift`.
template <int kBits>
void UnpackPlane(const uint8_t* section, int n, int shift, uint8_t* fields) noexcept {
  constexpr int kFields = 8 / kBits;
  constexpr unsigned kMask = (1U << kBits) - 1U;
  for (int begin = 0; begin < n; begin += 4 * kFields) {
    for (int byte = 0; byte < 4; ++byte) {
      const unsigned packed = *section++;
      for (int i = 0; i < kFields; ++i) {
        uint8_t& field = fields[begin + 8 * (i / 2) + 2 * byte + i % 2];
        field = static_cast<uint8_t>(
            field | (((packed >> static_cast<unsigned>(kBits * i)) & kMask) << static_cast<unsigned>(shift)));
      }
    }
  }
}

// A row's fields [head_dim] to its codes, and back. head_dim: a multiple of CodeChannels(kElementType).
template <ElementType kElementType>
KVANTA_HD void PackFields(const uint8_t* fields, int head_dim, uint8_t* codes) noexcept {
  constexpr ElementTypeInfo kInfo = Info(kElementType);
  PackPlane<kInfo.low_bits>(fields, head_dim, 0, codes);
  if constexpr (kInfo.high_bits != 0) {
    PackPlane<kInfo.high_bits>(fields, head_dim, kInfo.low_bits, codes + head_dim * kInfo.low_bits / 8);
  }
}
template <ElementType kElementType>
void UnpackFields(const uint8_t* codes, int head_dim, uint8_t* fields) noexcept {
  constexpr ElementTypeInfo kInfo = Info(kElementType);
  for (int i = 0; i < head_dim; ++i) fields[i] = 0;
  UnpackPlane<kInfo.low_bits>(codes, head_dim, 0, fields);
  if constexpr (kInfo.high_bits != 0) {
    UnpackPlane<kInfo.high_bits>(codes + head_dim * kInfo.low_bits / 8, head_dim, kInfo.low_bits, fields);
  }
}

// Channels of the longest row that a cell may have.
inline constexpr int kLongestRow = 1024;

template <ElementType kElementType>
inline constexpr CodeLevels kLevels = Levels(kElementType);

// Values of a row of codes.
template <ElementType kElementType>
void DecodeLevels(const uint8_t* codes, int head_dim, float* values) noexcept {
  uint8_t fields[kLongestRow];
  UnpackFields<kElementType>(codes, head_dim, fields);
  for (int i = 0; i < head_dim; ++i) {
    if constexpr (Info(kElementType).expanded == ElementType::kE4M3) {
      values[i] = E4m3::Decode(static_cast<uint8_t>(kLevels<kElementType>.level[fields[i]]));
      continue;
    }
    values[i] = static_cast<float>(kLevels<kElementType>.level[fields[i]]) * kLevels<kElementType>.unit;
  }
}

}  // namespace kvanta::formats
