// Matrices of +query: for each KV head a calibrated, invertible matrix A. A key is stored as y = A (k - mean), and a
// query reads it as A^-T q, so that their product is that of q and k - mean (docs/adr/0042).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/bit_allocation.h"
#include "formats/transform.h"

namespace kvanta::formats {

// Largest |A|_F |A^-1|_F, a bound on A's condition, of a matrix that is accepted: f32 products are accurate to some
// 1e-7 of it. Calibrated matrices stay below 1e4.
inline constexpr double kMaxCondition = 1e5;

// The matrices of one layer, as given and as the kernels read them. One object may serve any number of backends.
class QueryTransform {
 public:
  // matrices: f32 [kv_heads][head_dim][head_dim], row-major. Inverts them in double. Throws InputError if a value is
  // not finite, or a matrix is singular or nearly so or has an inverse beyond f32, naming the head.
  // allocations: of klt3 and klt2, the bits of each head's channels; empty: none.
  QueryTransform(std::vector<float> matrices, int kv_heads, int head_dim, std::vector<BitAllocation> allocations = {});

  int kv_heads() const noexcept { return kv_heads_; }
  int head_dim() const noexcept { return head_dim_; }
  const std::vector<float>& matrices() const noexcept { return matrices_; }
  // For MultiplyRow: A of a head for its keys, A^-T for its queries, one head after the other.
  const std::vector<float>& key_matrices() const noexcept { return key_matrices_; }
  const std::vector<float>& query_matrices() const noexcept { return query_matrices_; }
  const float* KeyMatrix(int head) const noexcept { return key_matrices_.data() + head * HeadFloats(); }
  const float* QueryMatrix(int head) const noexcept { return query_matrices_.data() + head * HeadFloats(); }
  const std::vector<BitAllocation>& allocations() const noexcept { return allocations_; }
  // Null without.
  const BitAllocation* Allocation(int head) const noexcept {
    return allocations_.empty() ? nullptr : allocations_.data() + head;
  }
  // "xxh64-0123456789abcdef" of the matrices' and allocations' bytes: stands for them in headers of pages.
  const std::string& Hash() const noexcept { return hash_; }

 private:
  int64_t HeadFloats() const noexcept { return head_dim_ * MatrixStride(head_dim_); }

  int kv_heads_;
  int head_dim_;
  std::vector<float> matrices_;
  std::vector<float> key_matrices_;         // [kv_heads][head_dim][stride]: A transposed
  std::vector<float> query_matrices_;       // [kv_heads][head_dim][stride]: the inverse of A
  std::vector<BitAllocation> allocations_;  // [kv_heads], or empty
  std::string hash_;
};

// Keys in their eigen-channels: what klt3 and klt2 are made of. The channels z = W (k - mean) of a head have a variance
// of 1 and are uncorrelated, and an error e of them lowers the quality by the sum of (deviation e)^2.
struct EigenChannels {
  std::vector<float> matrices;    // [kv_heads][head_dim][head_dim]: W
  std::vector<float> deviations;  // [kv_heads][head_dim], above 0, never rising
};

// values: [kv_heads][head_dim + 1][head_dim], as files have them (k_eigen): the last row of a head has its deviations.
EigenChannels SplitEigenChannels(std::span<const float> values, int head_dim);

// The transform of keys for a format with `mean_bits` bits on average: z times the root mean square of its levels; or,
// by_group, z itself, which token groups scale (klt_group.h). Throws InputError as QueryTransform does, and if
// deviations are not finite, not above 0 or rise.
std::shared_ptr<const QueryTransform> MakeKltTransform(const EigenChannels& channels, int kv_heads, int head_dim,
                                                       int mean_bits, bool by_group = false);

}  // namespace kvanta::formats
