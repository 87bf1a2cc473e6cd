#include "formats/query_transform.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

double Norm(std::span<const double> values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

// Inverse of a [n][n] matrix by Gauss-Jordan elimination with partial pivoting; not finite if it has none.
std::vector<double> Inverse(std::vector<double> matrix, int n) {
  const auto size = static_cast<size_t>(n);
  std::vector<double> inverse(size * size, 0.0);
  for (size_t i = 0; i < size; ++i) inverse[i * size + i] = 1;
  for (size_t column = 0; column < size; ++column) {
    size_t pivot = column;
    for (size_t row = column + 1; row < size; ++row) {
      if (std::abs(matrix[row * size + column]) > std::abs(matrix[pivot * size + column])) pivot = row;
    }
    for (std::vector<double>* rows : {&matrix, &inverse}) {
      double* const a = rows->data() + column * size;
      double* const b = rows->data() + pivot * size;
      if (a != b) std::swap_ranges(a, a + size, b);
    }
    const double scale = 1 / matrix[column * size + column];
    for (std::vector<double>* rows : {&matrix, &inverse}) {
      for (size_t i = 0; i < size; ++i) (*rows)[column * size + i] *= scale;
    }
    for (size_t row = 0; row < size; ++row) {
      const double factor = matrix[row * size + column];
      if (row == column || factor == 0) continue;
      for (std::vector<double>* rows : {&matrix, &inverse}) {
        double* const to = rows->data() + row * size;
        const double* const from = rows->data() + column * size;
        for (size_t i = 0; i < size; ++i) to[i] -= factor * from[i];
      }
    }
  }
  return inverse;
}

}  // namespace

QueryTransform::QueryTransform(std::vector<float> matrices, int kv_heads, int head_dim,
                               std::vector<BitAllocation> allocations)
    : kv_heads_(kv_heads), head_dim_(head_dim), matrices_(std::move(matrices)), allocations_(std::move(allocations)) {
  const auto size = static_cast<size_t>(head_dim);
  const auto stride = static_cast<size_t>(MatrixStride(head_dim));
  if (matrices_.size() != static_cast<size_t>(kv_heads) * size * size) {
    throw InputError(
        fmt::format("+query: {} values for {} matrices of {} x {}", matrices_.size(), kv_heads, head_dim, head_dim));
  }
  key_matrices_.assign(static_cast<size_t>(kv_heads) * size * stride, 0.0F);
  query_matrices_ = key_matrices_;
  for (size_t head = 0; head < static_cast<size_t>(kv_heads); ++head) {
    const std::span<const float> given(matrices_.data() + head * size * size, size * size);
    const std::vector<double> matrix(given.begin(), given.end());
    const double norm = Norm(matrix);
    if (!std::isfinite(norm)) throw InputError(fmt::format("+query: the matrix of KV head {} is not finite", head));
    const std::vector<double> inverse = Inverse(matrix, head_dim);
    const double condition = norm * Norm(inverse);
    if (!(condition <= kMaxCondition)) {
      throw InputError(
          fmt::format("+query: the matrix of KV head {} is singular or nearly so (condition {:.3g}, at most "
                      "{:.0e} is accepted)",
                      head, condition, kMaxCondition));
    }
    for (size_t i = 0; i < size; ++i) {
      for (size_t j = 0; j < size; ++j) {
        const auto of_query = static_cast<float>(inverse[i * size + j]);
        if (!std::isfinite(of_query)) {  // values below about 1e-38
          throw InputError(fmt::format("+query: the inverse of KV head {}'s matrix does not fit float32 ({:.3g})", head,
                                       inverse[i * size + j]));
        }
        key_matrices_[(head * size + j) * stride + i] = given[i * size + j];
        query_matrices_[(head * size + i) * stride + j] = of_query;
      }
    }
  }
  uint64_t hash = XXH64(matrices_.data(), matrices_.size() * sizeof(float), 0);
  for (const BitAllocation& allocation : allocations_) {
    const auto channels = static_cast<size_t>(allocation.head_dim);
    hash = XXH64(allocation.bits, channels / kAllocationBlock, hash);
    hash = XXH64(allocation.weight, channels * sizeof(float), hash);
    hash = XXH64(allocation.gain, channels * sizeof(int16_t), hash);
  }
  hash_ = fmt::format("xxh64-{:016x}", hash);
}

EigenChannels SplitEigenChannels(std::span<const float> values, int head_dim) {
  EigenChannels channels;
  const auto row = static_cast<std::ptrdiff_t>(head_dim);
  for (auto head = values.begin(); head != values.end(); head += (row + 1) * row) {
    channels.matrices.insert(channels.matrices.end(), head, head + row * row);
    channels.deviations.insert(channels.deviations.end(), head + row * row, head + (row + 1) * row);
  }
  return channels;
}

std::shared_ptr<const QueryTransform> MakeKltTransform(const EigenChannels& channels, int kv_heads, int head_dim,
                                                       int mean_bits, bool by_group) {
  const auto size = static_cast<size_t>(head_dim);
  std::vector<float> matrices = channels.matrices;
  if (head_dim % kAllocationBlock != 0 || head_dim < kMinHeadDim || head_dim > kMaxHeadDim) {
    throw InputError(fmt::format("klt{}: head_dim {} is not a multiple of {} from {} to {}", mean_bits, head_dim,
                                 kAllocationBlock, kMinHeadDim, kMaxHeadDim));
  }
  if (matrices.size() != static_cast<size_t>(kv_heads) * size * size ||
      channels.deviations.size() != static_cast<size_t>(kv_heads) * size) {
    throw InputError(fmt::format("klt{}: {} values and {} deviations for {} matrices of {} x {}", mean_bits,
                                 matrices.size(), channels.deviations.size(), kv_heads, head_dim, head_dim));
  }
  const int step = CodeChannels(mean_bits == 3 ? ElementType::kKlt3 : ElementType::kKlt2);
  const auto padded = static_cast<size_t>(RoundUp(head_dim, step));
  std::vector<BitAllocation> allocations;
  for (size_t head = 0; head < static_cast<size_t>(kv_heads); ++head) {
    const std::span<const float> deviations(channels.deviations.data() + head * size, size);
    for (size_t i = 0; i < size; ++i) {
      const bool falls = i == 0 || deviations[i] <= deviations[i - 1];
      if (falls && std::isfinite(deviations[i]) && deviations[i] > 0) continue;
      throw InputError(
          fmt::format("klt{}: deviation {} of channel {} of KV head {}: must be finite, above 0, and not "
                      "above that of the channel before",
                      mean_bits, deviations[i], i, head));
    }
    std::vector<float> with_padding(deviations.begin(), deviations.end());
    with_padding.resize(padded, 0.0F);
    allocations.push_back(AllocateBits(with_padding, mean_bits));
    for (size_t i = 0; i < size && !by_group; ++i) {
      const float rms = AllocatedRms(allocations.back().bits[i / kAllocationBlock]);
      for (size_t j = 0; j < size; ++j) matrices[(head * size + i) * size + j] *= rms;
    }
  }
  return std::make_shared<QueryTransform>(std::move(matrices), kv_heads, head_dim, std::move(allocations));
}

}  // namespace kvanta::formats
