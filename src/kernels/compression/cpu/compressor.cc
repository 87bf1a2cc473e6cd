#include "kernels/compression/cpu/compressor.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/math.h"

namespace kvanta::kernels {
namespace {

constexpr int64_t kCompressorChannels = 64;  // of a task

// Columns of a token's inputs: some channels of an entry, or of a key.
struct Columns {
  int64_t first = 0;   // column of the first channel's value in the first series
  int64_t series = 0;  // columns from a series to the next
  int64_t gates = 0;   // columns from a value to its gate
  int64_t count = 0;   // channels
  const float* bias = nullptr;
  int64_t bias_stride = 0;
};

class ChannelCompressor {
 public:
  ChannelCompressor(const CompressorOp& op, const Columns& columns) : op_(op), columns_(columns) {}

  // out: of the sequence's first entry in the step.
  void Run(size_t sequence, float* out, int64_t out_stride) const noexcept {
    for (const cache::StateSegment& segment : op_.states.OfSequence(sequence)) {
      float* state = op_.states.State(segment.to);
      Begin(op_.states.State(segment.from), state);
      for (int64_t row = segment.first_row; row < segment.first_row + segment.tokens; ++row) {
        const int64_t position = op_.positions[row];
        Copy(op_.inputs + row * op_.shape.InputWidth(), RowOf(state, position));
        if ((position + 1) % op_.shape.row_tokens != 0) continue;
        MakeEntry(state, position, out);
        out += out_stride;
      }
    }
  }

 private:
  float* RowOf(float* state, int64_t position) const noexcept {
    return state + position % op_.shape.KeptTokens() * op_.shape.InputWidth();
  }

  // Calls visit(column) for the first column of each run of `count`.
  template <class Visit>
  void ForRuns(Visit visit) const noexcept {
    for (int64_t series = 0; series < op_.shape.Series(); ++series) {
      visit(columns_.first + series * columns_.series);
      visit(columns_.first + series * columns_.series + columns_.gates);
    }
  }

  void Copy(const float* from, float* to) const noexcept {
    ForRuns([&](int64_t column) { std::copy_n(from + column, columns_.count, to + column); });
  }

  // Makes the state that of before a segment. from: null for zeros.
  void Begin(const float* from, float* to) const noexcept {
    if (from == to) return;
    for (int64_t token = 0; token < op_.shape.KeptTokens(); ++token) {
      const int64_t row = token * op_.shape.InputWidth();
      if (from != nullptr) {
        Copy(from + row, to + row);
      } else {
        ForRuns([&](int64_t column) { std::fill_n(to + row + column, columns_.count, 0.0F); });
      }
    }
  }

  // Calls visit(values, gates, bias) for the tokens of the entry that ends at `position`, in their order.
  template <class Visit>
  void ForTokens(float* state, int64_t position, Visit visit) const noexcept {
    const int64_t tokens = op_.shape.row_tokens;
    for (int64_t series = 0; series < op_.shape.Series(); ++series) {
      const int64_t end = position + 1 - (op_.shape.Series() - 1 - series) * tokens;
      if (end <= 0) continue;  // the first entry has no tokens before
      for (int64_t token = 0; token < tokens; ++token) {
        const float* values = RowOf(state, end - tokens + token) + columns_.first + series * columns_.series;
        visit(values, values + columns_.gates, columns_.bias + token * columns_.bias_stride + series * columns_.series);
      }
    }
  }

  void MakeEntry(float* state, int64_t position, float* out) const noexcept {
    const int64_t count = columns_.count;
    float largest[kCompressorChannels], sums[kCompressorChannels];
    std::fill_n(largest, count, -std::numeric_limits<float>::infinity());
    std::fill_n(sums, count, 0.0F);
    std::fill_n(out, count, 0.0F);
    ForTokens(state, position, [&](const float*, const float* gates, const float* bias) {
      for (int64_t i = 0; i < count; ++i) largest[i] = std::max(largest[i], gates[i] + bias[i]);
    });
    ForTokens(state, position, [&](const float* values, const float* gates, const float* bias) {
      for (int64_t i = 0; i < count; ++i) {
        const float weight = std::exp(gates[i] + bias[i] - largest[i]);
        sums[i] += weight;
        out[i] += weight * values[i];
      }
    });
    for (int64_t i = 0; i < count; ++i) out[i] /= sums[i];
  }

  const CompressorOp& op_;
  const Columns columns_;
};

}  // namespace

void Compress(const CompressorOp& op, ThreadPool& threads) noexcept {
  const CompressorShape& shape = op.shape;
  const int64_t of_entries = CeilDiv(shape.entry_dim, kCompressorChannels),
                blocks = of_entries + CeilDiv(shape.key_dim, kCompressorChannels);
  auto compress = [&](int64_t task, int) {
    const int64_t sequence = task / blocks, block = task % blocks;
    const bool is_key = block >= of_entries;
    const int64_t width = is_key ? shape.key_dim : shape.entry_dim;
    const int64_t channel = (is_key ? block - of_entries : block) * kCompressorChannels;
    const int64_t begin = is_key ? 2 * shape.Series() * shape.entry_dim : 0;
    const Columns columns{.first = begin + channel,
                          .series = width,
                          .gates = shape.Series() * width,
                          .count = std::min(kCompressorChannels, width - channel),
                          .bias = (is_key ? op.key_bias : op.entry_bias) + channel,
                          .bias_stride = shape.Series() * width};
    float* out = (is_key ? op.keys : op.entries) + op.first_entry[sequence] * width + channel;
    ChannelCompressor(op, columns).Run(static_cast<size_t>(sequence), out, width);
  };
  threads.ForEach(std::ssize(op.states.first_segments) * blocks, compress);
}

}  // namespace kvanta::kernels
