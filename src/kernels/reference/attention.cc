#include "kernels/reference/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "formats/transform.h"

namespace kvanta::kernels::reference {

void DecodeCell(formats::SideKind kind, const formats::Format& format, formats::CellShape shape, const uint8_t* cell,
                float static_scale, int tokens, float* rows) {
  const formats::CellPlanes planes = formats::PlanCell(format, shape);
  std::vector<uint8_t> codes(static_cast<size_t>(planes.row_bytes));
  std::vector<uint8_t> block_scales(static_cast<size_t>(planes.blocks * format.block_scale_bytes) + 1);
  std::vector<uint8_t> token_scales(static_cast<size_t>(format.token_scale_bytes) + 1);
  const formats::RowPlanes row{codes.data(), block_scales.data(), token_scales.data()};
  for (int token = 0; token < tokens; ++token) {
    formats::LoadRow(kind, format, shape, planes, token, cell, row);
    format.decode_row(row, shape.head_dim, static_scale, rows + int64_t{token} * shape.head_dim);
  }
}

void Hadamard(std::span<double> x) {
  const size_t block = static_cast<size_t>(formats::HadamardBlock(static_cast<int>(x.size())));
  std::vector<double> in(x.begin(), x.end());
  for (size_t row = 0; row < x.size(); ++row) {
    const size_t start = row / block * block;
    double sum = 0;
    for (size_t column = 0; column < block; ++column) {
      const bool negative = std::popcount((row - start) & column) % 2 != 0;
      sum += negative ? -in[start + column] : in[start + column];
    }
    x[row] = sum / std::sqrt(static_cast<double>(block));
  }
}

void Attend(std::span<const double> q, const float* keys, const float* values, int64_t count, const Logits& logits,
            std::span<double> out) {
  const size_t head_dim = q.size();
  std::vector<double> p(static_cast<size_t>(count));
  double peak = -std::numeric_limits<double>::infinity();
  for (size_t t = 0; t < p.size(); ++t) {
    double dot = logits.bias;
    for (size_t c = 0; c < head_dim; ++c) dot += q[c] * double{keys[t * head_dim + c]};
    double logit = dot * logits.scale;
    if (logits.softcap > 0) logit = logits.softcap * std::tanh(logit / logits.softcap);
    p[t] = logit;
    peak = std::max(peak, logit);
  }
  double sum = 0;
  for (double& value : p) {
    value = std::exp(value - peak);
    sum += value;
  }
  std::fill(out.begin(), out.end(), 0.0);
  for (size_t t = 0; t < p.size(); ++t) {
    for (size_t c = 0; c < head_dim; ++c) out[c] += p[t] / sum * double{values[t * head_dim + c]};
  }
}

}  // namespace kvanta::kernels::reference
