#include "kernels/attention/reference/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "formats/transform.h"

namespace kvanta::kernels::reference {

void DecodeCell(formats::SideKind kind, const formats::Format& format, formats::CellShape shape,
                const formats::CellSections& sections, const uint8_t* cell, formats::HeadParameters head, int tokens,
                float* rows) {
  const int64_t head_dim = shape.head_dim;
  if (format.decode_token_group != nullptr) {
    std::vector<uint8_t> canonical(static_cast<size_t>(sections.bytes));
    formats::ToCanonical(kind, format, shape, sections, cell, canonical.data());
    std::vector<float> all(static_cast<size_t>(shape.tokens * head_dim));
    for (int tile = 0; tile * format.scaling.token_group < shape.tokens; ++tile) {
      const uint8_t* bytes = canonical.data();
      format.decode_token_group(formats::CanonicalTokenGroup(format, sections, shape.head_dim, tile, bytes),
                                shape.head_dim, all.data() + tile * format.scaling.token_group * head_dim);
    }
    std::copy_n(all.begin(), tokens * head_dim, rows);
    return;
  }
  formats::RowBuffer buffer;
  const formats::RowSections row = buffer.Sections();
  for (int token = 0; token < tokens; ++token) {
    formats::LoadRow(kind, format, shape, sections, token, cell, row);
    format.decode_row(row, shape.head_dim, head, rows + token * head_dim);
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
  const size_t key_dim = q.size(), v_head_dim = out.size();
  std::vector<double> p(static_cast<size_t>(count));
  double max = logits.sink.value_or(-std::numeric_limits<double>::infinity());
  for (size_t t = 0; t < p.size(); ++t) {
    double dot = logits.bias;
    for (size_t c = 0; c < key_dim; ++c) dot += q[c] * double{keys[t * key_dim + c]};
    double logit = dot * logits.scale;
    if (logits.softcap > 0) logit = logits.softcap * std::tanh(logit / logits.softcap);
    p[t] = logit;
    max = std::max(max, logit);
  }
  double sum = logits.sink ? std::exp(*logits.sink - max) : 0;
  for (double& value : p) {
    value = std::exp(value - max);
    sum += value;
  }
  std::fill(out.begin(), out.end(), 0.0);
  for (size_t t = 0; t < p.size(); ++t) {
    for (size_t c = 0; c < v_head_dim; ++c) out[c] += p[t] / sum * double{values[t * v_head_dim + c]};
  }
}

}  // namespace kvanta::kernels::reference
