// Test oracle: attention over the decoded values of the cache's bytes, in double precision, as simple as possible.
// Every kernel is compared with it on the same bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "formats/cell_layout.h"
#include "formats/scheme.h"

namespace kvanta::kernels::reference {

// Decodes tokens [0, tokens) of a cell in the cache's layout: rows f32 [tokens][head_dim], still transformed.
void DecodeCell(formats::SideKind kind, const formats::Format& format, formats::CellShape shape,
                const formats::CellSections& sections, const uint8_t* cell, formats::HeadParameters head, int tokens,
                float* rows);

// Orthonormal Walsh-Hadamard transform of formats::Hadamard, in double, by its definition. x: [head_dim].
void Hadamard(std::span<double> x);

struct Logits {
  double scale = 1;    // softmax_scale
  double softcap = 0;  // 0: none
  double bias = 0;     // added to <q, k> before the scale (q.mean where keys are stored with their mean subtracted)
  std::optional<double> sink = {};  // one more logit, without a value
};

// One query row over keys [count][q.size()] and values [count][out.size()]: out = sum softmax(logits) v. All in the
// same (transformed) space.
void Attend(std::span<const double> q, const float* keys, const float* values, int64_t count, const Logits& logits,
            std::span<double> out);

}  // namespace kvanta::kernels::reference
