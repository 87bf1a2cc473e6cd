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

  // out: of the step's first row.
  void Run(size_t sequence, float* out, int64_t out_stride) const noexcept {
    for (const cache::StateSegment& segment : op_.states.OfSequence(sequence)) {
      const Tokens tokens{.state = op_.states.State(segment.from),
                          .inputs = op_.inputs + segment.first_row * op_.shape.InputWidth(),
                          .start = op_.positions[segment.first_row]};
      const int64_t end = tokens.start + segment.tokens;
      for (int64_t position = tokens.start; position < end && op_.entries != nullptr; ++position) {
        if ((position + 1) % op_.shape.row_tokens != 0) continue;
        MakeEntry(tokens, position, out + (segment.first_row + position - tokens.start) * out_stride);
      }
      if (segment.to != cache::kNoPage) Keep(tokens, end, op_.states.State(segment.to));
    }
  }

 private:
  // Inputs of a segment's tokens, from position `start` on, and of those before.
  struct Tokens {
    const float* state = nullptr;   // null: zeros
    const float* inputs = nullptr;  // of the token at `start`
    int64_t start = 0;
  };

  int64_t Place(int64_t position) const noexcept { return position % op_.shape.KeptTokens() * op_.shape.InputWidth(); }
  const float* RowOf(const Tokens& tokens, int64_t position) const noexcept {
    if (position < tokens.start) return tokens.state + Place(position);
    return tokens.inputs + (position - tokens.start) * op_.shape.InputWidth();
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

  // Makes `state` that of before position `end`. It may be that of before the segment.
  void Keep(const Tokens& tokens, int64_t end, float* state) const noexcept {
    const int64_t kept = op_.shape.KeptTokens();
    for (int64_t token = 0; token < kept && state != tokens.state; ++token) {
      const int64_t row = token * op_.shape.InputWidth();
      if (tokens.state != nullptr) {
        Copy(tokens.state + row, state + row);
      } else {
        ForRuns([&](int64_t column) { std::fill_n(state + row + column, columns_.count, 0.0F); });
      }
    }
    for (int64_t position = std::max(tokens.start, end - kept); position < end; ++position) {
      Copy(RowOf(tokens, position), state + Place(position));
    }
  }

  // Calls visit(values, gates, bias) for the tokens of the entry that ends at `position`, in their order.
  template <class Visit>
  void ForTokens(const Tokens& tokens, int64_t position, Visit visit) const noexcept {
    const int64_t count = op_.shape.row_tokens;
    for (int64_t series = 0; series < op_.shape.Series(); ++series) {
      const int64_t end = position + 1 - (op_.shape.Series() - 1 - series) * count;
      if (end <= 0) continue;  // the first entry has no tokens before
      for (int64_t token = 0; token < count; ++token) {
        const float* values = RowOf(tokens, end - count + token) + columns_.first + series * columns_.series;
        visit(values, values + columns_.gates, columns_.bias + token * columns_.bias_stride + series * columns_.series);
      }
    }
  }

  void MakeEntry(const Tokens& tokens, int64_t position, float* out) const noexcept {
    const int64_t count = columns_.count;
    float largest[kCompressorChannels], sums[kCompressorChannels];
    std::fill_n(largest, count, -std::numeric_limits<float>::infinity());
    std::fill_n(sums, count, 0.0F);
    std::fill_n(out, count, 0.0F);
    ForTokens(tokens, position, [&](const float*, const float* gates, const float* bias) {
      for (int64_t i = 0; i < count; ++i) largest[i] = std::max(largest[i], gates[i] + bias[i]);
    });
    ForTokens(tokens, position, [&](const float* values, const float* gates, const float* bias) {
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
    const float* bias = is_key ? op.key_bias : op.entry_bias;
    const int64_t begin = is_key ? 2 * shape.Series() * shape.entry_dim : 0;
    const Columns columns{.first = begin + channel,
                          .series = width,
                          .gates = shape.Series() * width,
                          .count = std::min(kCompressorChannels, width - channel),
                          .bias = bias == nullptr ? nullptr : bias + channel,
                          .bias_stride = shape.Series() * width};
    float* rows = is_key ? op.keys : op.entries;
    float* out = rows == nullptr ? nullptr : rows + channel;
    ChannelCompressor(op, columns).Run(static_cast<size_t>(sequence), out, width);
  };
  threads.ForEach(std::ssize(op.states.first_segments) * blocks, compress);
}

}  // namespace kvanta::kernels
