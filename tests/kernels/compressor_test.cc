// Compressor of tokens, compared with double precision; bits do not depend on how tokens are divided into steps,
// snapshots or threads.
#include "kernels/compression/cpu/compressor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

constexpr CompressorShape kCompressorShapes[] = {
    {.row_tokens = 4, .overlaps = true, .entry_dim = 72, .key_dim = 24},
    {.row_tokens = 8, .overlaps = false, .entry_dim = 130, .key_dim = 0},
    {.row_tokens = 2, .overlaps = true, .entry_dim = 8, .key_dim = 64},
};

struct CompressedSequence {
  CompressedSequence(const CompressorShape& s, int64_t count)
      : shape(s),
        inputs(RandomValues(count * s.InputWidth(), 1)),
        entry_bias(RandomValues(s.row_tokens * s.Series() * s.entry_dim, 2)),
        key_bias(RandomValues(s.row_tokens * s.Series() * s.key_dim, 3)),
        positions(static_cast<size_t>(count)),
        entries(static_cast<size_t>(count * s.entry_dim)),
        keys(static_cast<size_t>(count * s.key_dim)),
        records(static_cast<size_t>(4 * s.State().Floats()), std::nanf("")) {
    std::iota(positions.begin(), positions.end(), 0);
  }

  // Tokens [begin, end), whose state is stored after each of `stops` and at the end.
  void Step(int64_t begin, int64_t end, const std::vector<int64_t>& stops, int threads) {
    std::vector<cache::StateSegment> segments;
    int64_t from = begin;
    for (size_t i = 0; i <= stops.size(); ++i) {
      const int64_t to = i < stops.size() ? stops[i] : end;
      // Snapshots in other records than the working state, which is record 0 or 1 in turn.
      const cache::PageId record = i < stops.size() ? static_cast<cache::PageId>(2 + i % 2) : 1 - last;
      segments.push_back({.first_row = from - begin,
                          .tokens = static_cast<int32_t>(to - from),
                          .from = from == 0 ? cache::kNoPage
                                  : i == 0  ? last
                                            : segments.back().to,
                          .to = record});
      from = to;
    }
    last = segments.back().to;
    const int32_t first = 0;
    ThreadPool pool(threads);
    Compress({.shape = shape,
              .inputs = inputs.data() + begin * shape.InputWidth(),
              .positions = positions.data() + begin,
              .rows = end - begin,
              .entry_bias = entry_bias.data(),
              .key_bias = key_bias.data(),
              .states = {.segments = segments,
                         .first_segments = std::span(&first, 1),
                         .base = reinterpret_cast<uint8_t*>(records.data()),
                         .record_bytes = shape.State().Bytes()},
              .entries = entries.data() + begin * shape.entry_dim,
              .keys = keys.data() + begin * shape.key_dim},
             pool);
  }

  CompressorShape shape;
  std::vector<float> inputs, entry_bias, key_bias;
  std::vector<int64_t> positions;
  std::vector<float> entries, keys;  // by token: in the row of an entry's last one, others are zero
  std::vector<float> records;
  cache::PageId last = 1;
};

// Channel `c` of entry `entry` of `width` channels, whose inputs begin at column `first`.
double ExpectedEntry(const CompressedSequence& of, int64_t entry, int64_t width, int64_t first,
                     const std::vector<float>& bias, int64_t c) {
  const int64_t series = of.shape.Series(), tokens = of.shape.row_tokens;
  double sum = 0, weights = 0;
  for (int64_t s = 0; s < series; ++s) {
    const int64_t begin = (entry - (series - 1 - s)) * tokens;
    for (int64_t token = 0; token < tokens && begin >= 0; ++token) {
      const float* row = of.inputs.data() + (begin + token) * of.shape.InputWidth() + first + s * width + c;
      const double gate =
          double{row[series * width]} + double{bias[static_cast<size_t>((token * series + s) * width + c)]};
      weights += std::exp(gate);
      sum += std::exp(gate) * double{row[0]};
    }
  }
  return sum / weights;
}

TEST(Compressor, EqualsTheWeightedMeans) {
  for (const CompressorShape& shape : kCompressorShapes) {
    CompressedSequence sequence(shape, 41);
    sequence.Step(0, 41, {}, 2);
    for (int64_t entry = 0; entry < 41 / shape.row_tokens; ++entry) {
      const int64_t row = (entry + 1) * shape.row_tokens - 1;
      for (int64_t c = 0; c < shape.entry_dim; ++c) {
        ASSERT_NEAR(sequence.entries[static_cast<size_t>(row * shape.entry_dim + c)],
                    ExpectedEntry(sequence, entry, shape.entry_dim, 0, sequence.entry_bias, c), 1e-5);
      }
      const int64_t first = 2 * shape.Series() * shape.entry_dim;
      for (int64_t c = 0; c < shape.key_dim; ++c) {
        ASSERT_NEAR(sequence.keys[static_cast<size_t>(row * shape.key_dim + c)],
                    ExpectedEntry(sequence, entry, shape.key_dim, first, sequence.key_bias, c), 1e-5);
      }
    }
  }
}

TEST(Compressor, StepsSnapshotsAndThreadsChangeNoBit) {
  for (const CompressorShape& shape : kCompressorShapes) {
    CompressedSequence whole(shape, 61), parts(shape, 61);
    whole.Step(0, 61, {}, 1);
    parts.Step(0, 7, {}, 3);
    parts.Step(7, 8, {}, 1);
    parts.Step(8, 50, {16, 32, 48}, 2);
    for (int64_t token = 50; token < 61; ++token) parts.Step(token, token + 1, {}, 2);
    EXPECT_EQ(whole.entries, parts.entries);
    EXPECT_EQ(whole.keys, parts.keys);
    const auto floats = static_cast<size_t>(shape.State().Floats());
    EXPECT_EQ(std::memcmp(whole.records.data() + static_cast<size_t>(whole.last) * floats,
                          parts.records.data() + static_cast<size_t>(parts.last) * floats, floats * sizeof(float)),
              0)
        << "states";
  }
}

}  // namespace
}  // namespace kvanta::kernels
