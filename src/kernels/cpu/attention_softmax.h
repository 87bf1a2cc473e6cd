// Online softmax, the merge of partial results, and the table of an ISA unit's attention kernels; included by
// isa_<isa>.cc after attention_kernels.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// softcap * tanh(x / softcap); tanh(y) = 1 - 2 / (exp(2 y) + 1).
KVANTA_INLINE Lanes::F Softcap(Lanes::F x, float softcap) {
  const Lanes::F one = Lanes::Set1(1.0f);
  const Lanes::F e = Lanes::Exp(Lanes::Mul(x, Lanes::Set1(2.0f / softcap)));
  const Lanes::F tanh = Lanes::Sub(one, Lanes::Div(Lanes::Set1(2.0f), Lanes::Add(e, one)));
  return Lanes::Mul(tanh, Lanes::Set1(softcap));
}

KVANTA_INLINE float ExpOne(float x) {
  float lanes[16];
  Lanes::Store(lanes, Lanes::Exp(Lanes::Set1(x)));
  return lanes[0];
}

void Softmax(const SoftmaxPass& pass) {
  const int first = pass.begin / 16 * 16, last = static_cast<int>(RoundUp(pass.end, 16));
  for (int row = 0; row < pass.rows; ++row) {
    float* scores = pass.scores + row * kMaxPageTokens;
    Lanes::F peak = Lanes::Set1(kNegativeInfinity);
    for (int t = first; t < last; t += 16) {
      Lanes::F x = Lanes::Load(scores + t);
      if (pass.bias) x = Lanes::Add(x, Lanes::Set1(pass.bias[row]));
      if (pass.softcap > 0) x = Softcap(x, pass.softcap);
      x = KeepOr(x, kNegativeInfinity, pass.begin - t, pass.end - t);
      Lanes::Store(scores + t, x);
      peak = Lanes::Max(peak, x);
    }
    SoftmaxState& state = pass.state[row];
    const float page = Lanes::MaxOf(peak);
    const float top = state.max > page ? state.max : page;
    Lanes::F sum = Lanes::Zero();
    for (int t = first; t < last; t += 16) {
      Lanes::F p = Lanes::Exp(Lanes::Sub(Lanes::Load(scores + t), Lanes::Set1(top)));
      p = KeepOr(p, 0.0f, pass.begin - t, pass.end - t);
      Lanes::Store(scores + t, p);
      sum = Lanes::Add(sum, p);
    }
    pass.rescale[row] = state.max == kNegativeInfinity ? 0.0f : ExpOne(state.max - top);
    state.sum = state.sum * pass.rescale[row] + Lanes::Sum(sum);
    state.max = top;
  }
}

void Merge(SoftmaxState& state, float* out, const SoftmaxState& other, const float* other_out, int head_dim) {
  if (other.max == kNegativeInfinity) return;
  const bool empty = state.max == kNegativeInfinity;
  const float top = !empty && state.max > other.max ? state.max : other.max;
  const float keep = empty ? 0.0f : ExpOne(state.max - top);
  const float add = ExpOne(other.max - top);
  for (int c = 0; c < head_dim; c += 16) {
    const int lanes = head_dim - c < 16 ? head_dim - c : 16;
    const Lanes::F mine = empty ? Lanes::Zero() : Lanes::Mul(Lanes::LoadTail(out + c, lanes), Lanes::Set1(keep));
    const Lanes::F theirs = Lanes::Mul(Lanes::LoadTail(other_out + c, lanes), Lanes::Set1(add));
    Lanes::StoreTail(out + c, Lanes::Add(mine, theirs), lanes);
  }
  state.sum = (empty ? 0.0f : state.sum * keep) + other.sum * add;
  state.max = top;
}

void Normalize(const SoftmaxState& state, const float* out, int head_dim, float* result) {
  const Lanes::F inverse = Lanes::Set1(1.0f / state.sum);
  for (int c = 0; c < head_dim; c += 16) {
    const int lanes = head_dim - c < 16 ? head_dim - c : 16;
    Lanes::StoreTail(result + c, Lanes::Mul(Lanes::LoadTail(out + c, lanes), inverse), lanes);
  }
}

template <class Code>
constexpr KeyKernel MakeKeyKernel() {
  return {QueryBytes<Code>, PrepareQuery<Code>, Score<Code>};
}

// In the order of formats::Code.
constexpr AttentionKernels kAttentionKernels = {
    {MakeKeyKernel<CodeFp32>(), MakeKeyKernel<CodeBf16>(), MakeKeyKernel<CodeFp16>(), MakeKeyKernel<CodeE4M3>(),
     MakeKeyKernel<CodeE5M2>(), MakeKeyKernel<CodeInt8>(), MakeKeyKernel<KeyInt4>()},
    {{Accumulate<CodeFp32>},
     {Accumulate<CodeBf16>},
     {Accumulate<CodeFp16>},
     {Accumulate<CodeE4M3>},
     {Accumulate<CodeE5M2>},
     {Accumulate<CodeInt8>},
     {Accumulate<ValueInt4>}},
    Softmax,
    Merge,
    Normalize,
};

}  // namespace
}  // namespace kvanta::kernels
