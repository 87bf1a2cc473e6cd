#include "observe/rope_average.h"

#include <cmath>

#include "models/blocks/rope.h"

namespace kvanta::observe {
namespace {

using Complex = std::complex<double>;

// The mean of e^(i p angle) over the positions p in [0, count).
Complex MeanRotation(double angle, int64_t count) {
  const double half = std::sin(angle / 2);
  if (std::abs(half) < 1e-12) return 1;
  const auto n = static_cast<double>(count);
  return std::polar(std::sin(n * angle / 2) / (n * half), (n - 1) * angle / 2);
}

}  // namespace

RopeAverage::RopeAverage(const models::RopeSpec& rope, int head_dim, std::span<const int64_t> context_lengths,
                         int64_t positions, int64_t table_rows)
    : head_dim_(head_dim), pairs_(rope.rotary_dim / 2), interleaved_(rope.interleaved) {
  if (pairs_ == 0) return;
  const auto pairs = static_cast<size_t>(pairs_);
  models::RopeFrequencies undone = models::MakeRopeFrequencies(rope, positions);
  undone.attention_scaling = 1;
  cos_sin_.resize(static_cast<size_t>(table_rows) * 2 * pairs);
  models::FillRopeTable(undone, cos_sin_);
  rotation_.resize(pairs);
  difference_rotation_.resize(pairs * pairs);
  sum_rotation_.resize(pairs * pairs);
  const double weight = 1 / static_cast<double>(context_lengths.size());
  for (const int64_t length : context_lengths) {
    const std::vector<float> frequencies = models::MakeRopeFrequencies(rope, length).inverse;
    for (size_t a = 0; a < pairs; ++a) {
      const double frequency = frequencies[a];
      rotation_[a] += weight * MeanRotation(frequency, length);
      for (size_t b = 0; b < pairs; ++b) {
        difference_rotation_[a * pairs + b] += weight * MeanRotation(frequency - double{frequencies[b]}, length);
        sum_rotation_[a * pairs + b] += weight * MeanRotation(frequency + double{frequencies[b]}, length);
      }
    }
  }
}

void RopeAverage::Undo(int64_t position, double* row) const noexcept {
  const float* cos = cos_sin_.data() + position * 2 * pairs_;
  const float* sin = cos + pairs_;
  for (int i = 0; i < pairs_; ++i) {
    double& low = row[Low(i)];
    double& high = row[High(i)];
    const double a = low, b = high;
    low = a * double{cos[i]} + b * double{sin[i]};
    high = b * double{cos[i]} - a * double{sin[i]};
  }
}

void RopeAverage::AverageSum(double* sum) const noexcept {
  for (int i = 0; i < pairs_; ++i) {
    const Complex z = Complex(sum[Low(i)], sum[High(i)]) * rotation_[static_cast<size_t>(i)];
    sum[Low(i)] = z.real();
    sum[High(i)] = z.imag();
  }
}

void RopeAverage::AverageMoment(double* moment) const noexcept {
  const int n = head_dim_;
  const auto at = [&](int i, int j) -> double& { return moment[int64_t{i} * n + j]; };
  for (int a = 0; a < pairs_; ++a) {
    const int al = Low(a), ah = High(a);
    for (int b = 0; b < pairs_; ++b) {
      const int bl = Low(b), bh = High(b);
      const auto place = static_cast<size_t>(a) * static_cast<size_t>(pairs_) + static_cast<size_t>(b);
      // E z_a conj(z_b) and E z_a z_b.
      const Complex hermitian = Complex(at(al, bl) + at(ah, bh), at(ah, bl) - at(al, bh)) * difference_rotation_[place];
      const Complex plain = Complex(at(al, bl) - at(ah, bh), at(ah, bl) + at(al, bh)) * sum_rotation_[place];
      at(al, bl) = (hermitian.real() + plain.real()) / 2;
      at(ah, bh) = (hermitian.real() - plain.real()) / 2;
      at(ah, bl) = (plain.imag() + hermitian.imag()) / 2;
      at(al, bh) = (plain.imag() - hermitian.imag()) / 2;
    }
    for (int other = 2 * pairs_; other < n; ++other) {
      const Complex z = Complex(at(al, other), at(ah, other)) * rotation_[static_cast<size_t>(a)];
      at(al, other) = at(other, al) = z.real();
      at(ah, other) = at(other, ah) = z.imag();
    }
  }
}

}  // namespace kvanta::observe
