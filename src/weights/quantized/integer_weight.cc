#include "weights/quantized/integer_weight.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace kvanta::weights {
namespace {

// Columns sorted by their group; empty if they are in order already.
std::vector<int32_t> OrderOf(const std::vector<int32_t>& group_index) {
  if (std::ranges::is_sorted(group_index)) return {};
  std::vector<int32_t> order(group_index.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t column) { return group_index[static_cast<size_t>(column)]; });
  return order;
}

// True if the columns in `order` fill one group after the other.
bool FillsGroups(const std::vector<int32_t>& group_index, const std::vector<int32_t>& order, int64_t group) {
  for (size_t i = 0; i < group_index.size(); ++i) {
    const size_t column = order.empty() ? i : static_cast<size_t>(order[i]);
    if (group_index[column] != static_cast<int64_t>(i) / group) return false;
  }
  return true;
}

// Codes of 8 bits less their zero points fit 8 bits only if they are symmetric.
bool IsKept(const IntegerParts& parts) {
  constexpr int kSymmetric8 = 128;
  return parts.bits < 8 || std::ranges::all_of(parts.zeros, [](uint16_t zero) { return zero == kSymmetric8; });
}

class IntegerWeight final : public QuantizedWeight {
 public:
  IntegerWeight(const WeightSource& source, IntegerParts parts)
      : QuantizedWeight(source.out, source.in, {CodeType::kNone, GroupScale::kF32, parts.group}),
        parts_(std::move(parts)) {
    if (!parts_.group_index.empty()) {
      order_ = OrderOf(parts_.group_index);
      if (!FillsGroups(parts_.group_index, order_, parts_.group)) return;
    }
    if (IsKept(parts_)) format_.codes = parts_.bits == 4 ? CodeType::kInt4 : CodeType::kInt8;
  }

  void ReadCodes(int64_t row, uint8_t* codes) const override {
    std::vector<uint8_t> raw(static_cast<size_t>(In()));
    Unpack(row, raw.data());
    for (int64_t i = 0; i < In(); ++i) {
      const int zero = format_.codes == CodeType::kInt8 ? Zero(row, i / parts_.group) : 0;
      const auto column = static_cast<size_t>(order_.empty() ? i : order_[static_cast<size_t>(i)]);
      codes[i] = static_cast<uint8_t>(raw[column] - zero);
    }
  }
  void ReadScales(int64_t row, float* scales) const override {
    std::copy_n(parts_.scales.begin() + row * Groups(), Groups(), scales);
  }
  void ReadZeros(int64_t row, uint8_t* zeros) const override {
    for (int64_t group = 0; group < Groups(); ++group) zeros[group] = static_cast<uint8_t>(Zero(row, group));
  }
  void DequantizeRow(int64_t row, float* out) const override {
    std::vector<uint8_t> raw(static_cast<size_t>(In()));
    Unpack(row, raw.data());
    for (int64_t k = 0; k < In(); ++k) {
      const int64_t group = parts_.group_index.empty() ? k / parts_.group : parts_.group_index[static_cast<size_t>(k)];
      const float scale = parts_.scales[static_cast<size_t>(row * Groups() + group)];
      out[k] = static_cast<float>(raw[static_cast<size_t>(k)] - Zero(row, group)) * scale;
    }
  }

 private:
  int Zero(int64_t row, int64_t group) const { return parts_.zeros[static_cast<size_t>(row * Groups() + group)]; }

  // Codes of a row in the order of W's columns.
  void Unpack(int64_t row, uint8_t* codes) const {
    if (parts_.packing == Packing::kAwq) {
      const int shift = 4 * kAwqPosition[row % 8];
      for (int64_t k = 0; k < In(); ++k) {
        codes[k] = static_cast<uint8_t>(WordAt(parts_.words, k * (Out() / 8) + row / 8) >> shift & 15U);
      }
      return;
    }
    const bool rows = parts_.packing == Packing::kRows;
    const int64_t first = rows ? row * WordsOf(In(), parts_.bits) : row, stride = rows ? 1 : Out();
    const auto word = [&](int64_t i) { return WordAt(parts_.words, first + i * stride); };
    if (32 % parts_.bits != 0) {  // some codes are in two words
      for (int64_t k = 0; k < In(); ++k) codes[k] = static_cast<uint8_t>(CodeOf(word, k, parts_.bits));
      return;
    }
    const int per_word = 32 / parts_.bits;
    const uint32_t mask = (1U << parts_.bits) - 1;
    for (int64_t k = 0; k < In();) {
      uint32_t packed = word(k / per_word);
      for (int i = 0; i < per_word && k < In(); ++i, ++k, packed >>= parts_.bits) {
        codes[k] = static_cast<uint8_t>(packed & mask);
      }
    }
  }

  IntegerParts parts_;
};

}  // namespace

uint32_t WordAt(const uint8_t* data, int64_t i) noexcept {
  uint32_t word;
  std::memcpy(&word, data + i * 4, sizeof word);
  return word;
}

std::unique_ptr<QuantizedWeight> MakeIntegerWeight(const ModuleTensors& tensors, std::string_view index_part,
                                                   const WeightSource& source, IntegerParts parts) {
  const auto groups = (source.in + parts.group - 1) / parts.group;
  for (const int32_t group : parts.group_index) {
    if (group >= 0 && group < groups) continue;
    tensors.Fail(index_part,
                 fmt::format("has the group {}; there are {} groups of {} columns", group, groups, parts.group));
  }
  return std::make_unique<IntegerWeight>(source, std::move(parts));
}

}  // namespace kvanta::weights
