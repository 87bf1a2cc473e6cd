// Dense modules of sentence-transformers, which project pooled hidden states to embeddings. Format:
// https://github.com/huggingface/sentence-transformers (sentence_transformers/models/Dense.py).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvanta::kernels {
class Ops;
}

namespace kvanta::models {

// activation(weight x + bias), in double precision.
struct DenseModule {
  int64_t in = 0, out = 0;
  std::vector<float> weight;  // [out][in]
  std::vector<float> bias;    // [out]; empty: none
  bool tanh = false;          // the activation; else there is none

  std::vector<double> Forward(std::span<const double> x) const;
};

// The modules of type Dense in the order of modules.json; none without that file. hidden: channels that the first one
// takes. Throws InputError naming the file, the key, the value and the alternatives.
std::vector<DenseModule> ReadDenseModules(const std::string& folder, int64_t hidden, kernels::Ops& ops);

}  // namespace kvanta::models
