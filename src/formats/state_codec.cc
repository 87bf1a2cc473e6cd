#include "formats/state_codec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "base/math.h"
#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

constexpr int kColumns = 16;              // columns that are transformed together
constexpr float kLeastScale = 0x1p-126F;  // smaller ones have no inverse
constexpr int64_t kBlock = 32;            // other floats that share a scale
constexpr float kInt8Limit = 127;
constexpr int64_t kMaxRows = 256;  // of a block of the transform

// 0 for a scale that is too small to have an inverse; not a number for one that is not finite.
float InverseScale(float scale) noexcept {
  return scale >= kLeastScale ? 1.0F / scale : 0.0F * scale;
}

// The nearest integer, even ones first, of magnitudes up to `limit`.
float NearestCode(float value, float limit) noexcept {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: a sum with it has no fraction
  const float clipped = value > limit ? limit : value < -limit ? -limit : value;
  return clipped + kMagic - kMagic;
}

bool IsInteger(StateCode code) noexcept {
  return code == StateCode::kInt8 || code == StateCode::kInt4;
}

// Rows of a block of the Hadamard transform.
int64_t BlockRows(int64_t rows) noexcept {
  return std::min(rows & -rows, kMaxRows);
}

int64_t MatrixBytes(StateCode code, const StateShape& shape) noexcept {
  const int64_t values = shape.MatrixFloats();
  const int64_t scales = shape.columns * 2;
  if (code == StateCode::kInt8) return scales + values;
  if (code == StateCode::kInt4) return scales + values / 2;
  return values * (code == StateCode::kBf16 ? 2 : 4);
}

// One matrix of a state, 16 columns at a time.
class Matrix {
 public:
  Matrix(StateCode code, const StateShape& shape, int64_t first, int64_t count)
      : code_(code), shape_(shape), first_(first), count_(static_cast<int>(count)), block_(BlockRows(shape.rows)) {}

  // Scales of the columns, from the transformed ones.
  void SetScales(const float* state, float* scales) const noexcept {
    float largest[kColumns] = {};
    float rows[kMaxRows * kColumns] = {};
    for (int64_t row = 0; row < shape_.rows; row += block_) {
      Load(state, row, rows);
      Transform(rows);
      for (int64_t i = 0; i < block_; ++i) {
        for (int c = 0; c < count_; ++c) {
          const float magnitude = std::abs(rows[i * kColumns + c]);
          // A NaN stays: the scale, and with it the column, is not finite.
          largest[c] = magnitude > largest[c] || magnitude != magnitude ? magnitude : largest[c];
        }
      }
    }
    for (int c = 0; c < count_; ++c) scales[c] = Bf16ToFloat(FloatToBf16(largest[c] / MaxCode()));
  }

  void Round(const float* scales, float* state, uint8_t* coded) const noexcept {
    float rows[kMaxRows * kColumns] = {}, inverse[kColumns];
    for (int c = 0; c < count_; ++c) inverse[c] = InverseScale(scales[c]);
    for (int64_t row = 0; row < shape_.rows; row += block_) {
      Load(state, row, rows);
      Transform(rows);
      for (int64_t i = 0; i < block_; ++i) {
        float* values = rows + i * kColumns;
        for (int c = 0; c < count_; ++c) values[c] = NearestCode(values[c] * inverse[c], MaxCode());
        if (coded != nullptr) StoreCodes(values, row + i, coded);
        for (int c = 0; c < count_; ++c) values[c] *= scales[c];
      }
      Transform(rows);
      Store(rows, row, state);
    }
    if (coded == nullptr) return;
    for (int c = 0; c < count_; ++c) {
      const uint16_t scale = FloatToBf16(scales[c]);
      std::memcpy(coded + (first_ + c) * 2, &scale, sizeof scale);
    }
  }

  void Decode(const uint8_t* coded, float* state) const noexcept {
    float rows[kMaxRows * kColumns] = {}, scales[kColumns];
    for (int c = 0; c < count_; ++c) {
      uint16_t scale;
      std::memcpy(&scale, coded + (first_ + c) * 2, sizeof scale);
      scales[c] = Bf16ToFloat(scale);
    }
    for (int64_t row = 0; row < shape_.rows; row += block_) {
      for (int64_t i = 0; i < block_; ++i) {
        LoadCodes(coded, row + i, rows + i * kColumns);
        for (int c = 0; c < count_; ++c) rows[i * kColumns + c] *= scales[c];
      }
      Transform(rows);
      Store(rows, row, state);
    }
  }

 private:
  float MaxCode() const noexcept { return code_ == StateCode::kInt8 ? kInt8Limit : 7.0F; }

  void Load(const float* state, int64_t row, float* rows) const noexcept {
    for (int64_t i = 0; i < block_; ++i) {
      std::copy_n(state + (row + i) * shape_.columns + first_, count_, rows + i * kColumns);
    }
  }
  void Store(const float* rows, int64_t row, float* state) const noexcept {
    for (int64_t i = 0; i < block_; ++i) {
      std::copy_n(rows + i * kColumns, count_, state + (row + i) * shape_.columns + first_);
    }
  }

  // The orthogonal Hadamard transform of each column, its own inverse.
  void Transform(float* rows) const noexcept {
    for (int64_t half = 1; half < block_; half *= 2) {
      for (int64_t first = 0; first < block_; first += 2 * half) {
        for (int64_t i = first; i < first + half; ++i) {
          float *a = rows + i * kColumns, *b = a + half * kColumns;
          for (int c = 0; c < kColumns; ++c) {
            const float sum = a[c] + b[c], difference = a[c] - b[c];
            a[c] = sum;
            b[c] = difference;
          }
        }
      }
    }
    const float norm = 1.0F / std::sqrt(static_cast<float>(block_));
    for (int64_t i = 0; i < block_ * kColumns; ++i) rows[i] *= norm;
  }

  uint8_t* CodesOf(uint8_t* coded, int64_t row) const noexcept {
    const int64_t bytes = code_ == StateCode::kInt8 ? shape_.columns : shape_.columns / 2;
    return coded + shape_.columns * 2 + row * bytes + (code_ == StateCode::kInt8 ? first_ : first_ / 2);
  }
  void StoreCodes(const float* values, int64_t row, uint8_t* coded) const noexcept {
    uint8_t* out = CodesOf(coded, row);
    int8_t codes[kColumns];
    for (int c = 0; c < count_; ++c) codes[c] = static_cast<int8_t>(values[c] == values[c] ? values[c] : 0.0F);
    if (code_ == StateCode::kInt8) {
      std::memcpy(out, codes, static_cast<size_t>(count_));
      return;
    }
    for (int c = 0; c < count_; c += 2) {
      out[c / 2] = static_cast<uint8_t>((codes[c] & 15) | ((codes[c + 1] & 15) << 4));
    }
  }
  void LoadCodes(const uint8_t* coded, int64_t row, float* values) const noexcept {
    const uint8_t* in = CodesOf(const_cast<uint8_t*>(coded), row);
    for (int c = 0; c < count_; ++c) {
      if (code_ == StateCode::kInt8) {
        values[c] = static_cast<float>(static_cast<int8_t>(in[c]));
      } else {
        const int code = in[c / 2] >> (c % 2 * 4) & 15;
        values[c] = static_cast<float>(code < 8 ? code : code - 16);
      }
    }
  }

  const StateCode code_;
  const StateShape& shape_;
  const int64_t first_;
  const int count_;
  const int64_t block_;
};

void RoundBf16(float* values, int64_t count, uint8_t* coded) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t code = FloatToBf16(values[i]);
    if (coded != nullptr) std::memcpy(coded + i * 2, &code, sizeof code);
    values[i] = Bf16ToFloat(code);
  }
}

// The other floats of a state with integers, in blocks.
void RoundBlocks(float* values, int64_t count, uint8_t* coded) noexcept {
  for (int64_t first = 0; first < count; first += kBlock, values += kBlock) {
    const int64_t n = std::min(kBlock, count - first);
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float magnitude = std::abs(values[i]);
      largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
    }
    const uint16_t scale_code = FloatToBf16(largest / kInt8Limit);
    const float scale = Bf16ToFloat(scale_code), inverse = InverseScale(scale);
    if (coded != nullptr) std::memcpy(coded, &scale_code, sizeof scale_code);
    for (int64_t i = 0; i < n; ++i) {
      const float code = NearestCode(values[i] * inverse, kInt8Limit);
      if (coded != nullptr) coded[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(code == code ? code : 0.0F));
      values[i] = code * scale;
    }
    if (coded != nullptr) coded += 2 + n;
  }
}

void DecodeBlocks(const uint8_t* coded, int64_t count, float* values) noexcept {
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t n = std::min(kBlock, count - first);
    uint16_t scale;
    std::memcpy(&scale, coded, sizeof scale);
    for (int64_t i = 0; i < n; ++i) {
      values[first + i] = static_cast<float>(static_cast<int8_t>(coded[2 + i])) * Bf16ToFloat(scale);
    }
    coded += 2 + n;
  }
}

void DecodeBf16(const uint8_t* coded, int64_t count, float* values) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t code;
    std::memcpy(&code, coded + i * 2, sizeof code);
    values[i] = Bf16ToFloat(code);
  }
}

template <class Visit>
void VisitColumns(StateCode code, const StateShape& shape, Visit visit) noexcept {
  for (int64_t first = 0; first < shape.columns; first += kColumns) {
    visit(Matrix(code, shape, first, std::min<int64_t>(kColumns, shape.columns - first)));
  }
}

}  // namespace

StateCode ParseStateCode(std::string_view name) {
  const auto* found = std::ranges::find(kStateCodeNames, name);
  if (found == std::end(kStateCodeNames)) {
    throw InputError(
        fmt::format("state_cache_dtype = {}: expected one of {}", Quote(name), fmt::join(kStateCodeNames, ", ")));
  }
  return static_cast<StateCode>(found - std::begin(kStateCodeNames));
}

int64_t CodedStateBytes(StateCode code, const StateShape& shape) noexcept {
  const int64_t others = IsInteger(code) ? shape.others + CeilDiv(shape.others, kBlock) * 2
                                         : shape.others * (code == StateCode::kFloat32 ? 4 : 2);
  return shape.matrices * MatrixBytes(code, shape) + others;
}

void RoundStatePart(StateCode code, const StateShape& shape, int64_t part, float* state, uint8_t* coded) noexcept {
  float* values = state + part * shape.MatrixFloats();
  uint8_t* to = coded == nullptr ? nullptr : coded + part * MatrixBytes(code, shape);
  const bool is_matrix = part < shape.matrices;
  if (!IsInteger(code)) return RoundBf16(values, is_matrix ? shape.MatrixFloats() : shape.others, to);
  if (!is_matrix) return RoundBlocks(values, shape.others, to);
  VisitColumns(code, shape, [&](const Matrix& matrix) {
    float scales[kColumns] = {};
    matrix.SetScales(values, scales);
    matrix.Round(scales, values, to);
  });
}

void DecodeStatePart(StateCode code, const StateShape& shape, int64_t part, const uint8_t* coded,
                     float* state) noexcept {
  float* values = state + part * shape.MatrixFloats();
  const uint8_t* from = coded + part * MatrixBytes(code, shape);
  const bool is_matrix = part < shape.matrices;
  if (!IsInteger(code)) return DecodeBf16(from, is_matrix ? shape.MatrixFloats() : shape.others, values);
  if (!is_matrix) return DecodeBlocks(from, shape.others, values);
  VisitColumns(code, shape, [&](const Matrix& matrix) { matrix.Decode(from, values); });
}

}  // namespace kvanta::formats
