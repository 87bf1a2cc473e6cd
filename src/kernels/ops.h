// Operations of a model's forward, one object per device. Activations are f32 between operations. All pointers are to
// the device's memory; on a GPU, calls are asynchronous. Batch-invariant: a row's bits do not depend on the number of
// rows or threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/device.h"
#include "base/thread_pool.h"
#include "kernels/activation.h"
#include "kernels/compression/compressor.h"
#include "kernels/hyper_connections/hyper_connections.h"
#include "kernels/launch_graph.h"
#include "kernels/linear/linear.h"
#include "kernels/linear_attention/gated_delta_net.h"
#include "kernels/linear_attention/mamba2.h"
#include "kernels/linear_attention/short_conv.h"
#include "kernels/moe/moe_layer.h"
#include "kernels/pointwise.h"
#include "kernels/rope_kind.h"
#include "kernels/sampling/sample_params.h"
#include "weights/quantized_weight.h"

namespace kvanta::kernels {

struct IsaTable;

class Ops {
 public:
  virtual ~Ops() = default;
  virtual Device& device() const noexcept = 0;
  virtual ThreadPool& threads() const noexcept = 0;
  // True if the device's memory is the host's and calls are synchronous.
  virtual bool OnHost() const noexcept = 0;

  // Packs the weights, stacked along `out` (q|k|v as one), for this device. kind selects the storage of W and the
  // arithmetic (kF32: f32; kBf16: x rounded to bf16, f32 sums; kF16: W in f16, x in f32; kInt8, kInt4: x in 8 or 16
  // bits, exact dots of 32, f32 sums). kInt8 keeps Q8_0 and kInt4 keeps Q4_0 and Q4_1 as they are; everything else is
  // quantized. kStored keeps every view as it is; on a GPU, blocks other than these become bf16. bias: f32 [sum of out]
  // or empty. The views may be unmapped afterwards.
  virtual std::unique_ptr<Linear> MakeLinear(std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                             LinearKind kind) = 0;

  // Likewise packs weights with codes and scales as they are (quantized_weight.h); x stays f32. Null if this device
  // does not read their format, or they differ in it: then rows may be read as f32 and given to MakeLinear().
  virtual std::unique_ptr<Linear> MakeQuantizedLinear(std::span<const weights::QuantizedView> stacked,
                                                      std::span<const float> bias) = 0;

  // Combines layers made by MakeLinear() into a few launches; null on the CPU, which runs them one by one.
  virtual std::unique_ptr<LinearGroup> MakeGroup(std::vector<std::unique_ptr<Linear>>&& layers) = 0;

  // A layer of experts, of linear layers that MakeLinear gave: this rank's part. Throws ResourceError.
  virtual std::unique_ptr<ExpertLayer> MakeExperts(std::vector<ExpertWeights>&& experts, const MoeConfig& moe,
                                                   const RouterVectors& router, const ExpertDivision& division) = 0;

  // out[r] = row ids[r] - first of table's weight, f32 [rows][table.In()]; rows of ids that are not of the table's
  // [first, first + table.Out()) stay as they are.
  virtual void Embed(const Linear& table, int64_t first, const int32_t* ids, int64_t rows, float* out) noexcept = 0;
  // out[r] = x[r][parts.RankOf(ids[r])]: f32 [rows][parts.ranks][width] -> [rows][width].
  virtual void PickParts(const float* x, const parallel::Partition& parts, const int32_t* ids, int64_t rows,
                         int64_t width, float* out) noexcept = 0;
  // out = x / sqrt(mean(x^2) + eps) * weight; x, out: f32 [rows][width], row strides in floats; may alias.
  virtual void RmsNorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
                       float* out, int64_t out_stride) noexcept = 0;
  // out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, as RmsNorm(); bias may be null.
  virtual void LayerNorm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps,
                         int64_t rows, int64_t width, float* out, int64_t out_stride) noexcept = 0;
  // x += y unless y is null, then out = RmsNorm(x): f32 [rows][width], dense; out may be x. `reader`: the linear layer
  // that reads `out` next, which a GPU packs for it by the same launch, or null; nothing may write to `out` before.
  virtual void AddRmsNorm(float* x, const float* y, const float* weight, float eps, int64_t rows, int64_t width,
                          float* out, const Linear* reader) noexcept = 0;
  // out[r] = x[r]: f32 [rows][width], row strides in floats.
  virtual void Copy(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* out,
                    int64_t out_stride) noexcept = 0;
  // out[i] = x[rows[i]]: f32 [count][width], dense.
  virtual void Gather(const float* x, int64_t width, const int64_t* rows, int64_t count, float* out) noexcept = 0;
  // x += y, both f32 [n].
  virtual void Add(float* x, const float* y, int64_t n) noexcept = 0;
  // x[r] += y[r] / (1 + exp(-gate[r])): f32 [rows][width], dense; gate: [rows].
  virtual void AddGated(float* x, const float* y, const float* gate, int64_t rows, int64_t width) noexcept = 0;
  // Rotates the first rotary_dim channels of each head in place. x: f32 [rows][heads * head_dim] with row stride
  // `stride`; cos_sin: f32 [positions][rotary_dim], the first half cos, the second sin; positions: int64 [rows].
  virtual void Rope(float* x, int64_t stride, int64_t rows, int heads, int head_dim, int rotary_dim, RopeKind kind,
                    const float* cos_sin, const int64_t* positions) noexcept = 0;
  // out[r][i] = activation(gate_up[r][i]) * gate_up[r][width + i]; gate_up: f32 [rows][2 * width]; out: f32
  // [rows][width]. With a `limit`, which only kSilu may have, min(silu(gate), limit) times up, which is cut off below
  // -limit and above it (Step 3.5); 0: none. reader: as of AddRmsNorm(); if it is not null, it alone may read `out`.
  virtual void ActivateMul(Activation activation, float limit, const float* gate_up, int64_t rows, int64_t width,
                           float* out, const Linear* reader) noexcept = 0;
  // out = ActivateMul() of the outputs of `gate_up` for x, f32 [rows][in], for which `both` is memory, f32 [rows][out].
  // A GPU may compute it by one launch.
  virtual void ForwardGated(const Linear& gate_up, const float* x, int64_t rows, Activation activation, float limit,
                            float* both, float* out, const Linear* reader) noexcept {
    gate_up.Forward(x, rows, both, gate_up.Out());
    ActivateMul(activation, limit, both, rows, gate_up.Out() / 2, out, reader);
  }
  // x = activation(x), f32 [n]. xielu: of kXielu.
  virtual void Activate(Pointwise activation, const Xielu& xielu, float* x, int64_t n) noexcept = 0;
  // x[r][i] *= function(gate[r][i / channels]): f32 [rows][width], row strides in floats.
  virtual void MulGate(GateFunction function, float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                       int64_t rows, int64_t width, int64_t channels) noexcept = 0;
  // Recurrent layers. `runs` of GatedDeltaNetOp and the segments of a step are read on the host.
  virtual void GatedDeltaNet(const GatedDeltaNetOp& op) noexcept = 0;
  virtual void ShortConv(const ShortConvOp& op) noexcept = 0;
  virtual void Mamba2(const Mamba2Op& op) noexcept = 0;
  virtual void Compress(const CompressorOp& op) noexcept = 0;
  // Hyper-connections. Makes the weights of rows, f32 [rows][Weights()], in place, from the projections of the streams.
  virtual void MakeStreamWeights(const HyperConnectionShape& shape, const StreamParameters& parameters, int64_t rows,
                                 float* weights) noexcept = 0;
  // A block's input, out[row] = sum of weight * stream: streams f32 [rows][streams][hidden], out f32 [rows][hidden].
  virtual void CollapseStreams(const HyperConnectionShape& shape, const float* streams, const float* weights,
                               int64_t rows, float* out) noexcept = 0;
  // Mixes the streams in place and adds a block's output to each: x f32 [rows][hidden].
  virtual void ExpandStreams(const HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                             float* streams) noexcept = 0;
  // Makes the logits of all experts but those of the rows' tokens -infinity, with which none is chosen: logits f32
  // [rows][experts], tokens [rows], experts_of_token [vocab][of_token].
  virtual void KeepExperts(float* logits, int64_t rows, int32_t experts, const int32_t* tokens,
                           const int32_t* experts_of_token, int32_t of_token) noexcept = 0;
  // x = min(x, limit): f32 [rows][width], row stride in floats; NaN stays NaN.
  virtual void CutOffAbove(float* x, int64_t stride, int64_t rows, int64_t width, float limit) noexcept = 0;
  // x *= factor, f32 [n].
  virtual void Scale(float* x, float factor, int64_t n) noexcept = 0;
  // x[r] *= factors[positions[r]]: f32 [rows][width], row stride in floats; positions: int64 [rows].
  virtual void ScaleRows(float* x, int64_t stride, int64_t rows, int64_t width, const float* factors,
                         const int64_t* positions) noexcept = 0;
  // x *= factor: f32 [rows][width], row stride in floats.
  virtual void ScaleColumns(float* x, int64_t stride, int64_t rows, int64_t width, float factor) noexcept = 0;
  // x = softcap * tanh(x / softcap), f32 [rows][width], unless softcap is 0; then argmaxes of the rows [rows] unless
  // null.
  virtual void Softcap(float* x, int64_t rows, int64_t width, float softcap, RowArgmax* argmaxes) noexcept = 0;
  // Captures the launches of `launches` without starting them (cuda/cuda_context.h); null on the host, where it is not
  // called. Throws ResourceError.
  virtual std::unique_ptr<LaunchGraph> Capture(const std::function<void()>& launches) = 0;
  // tokens[r]: the token sampled by params[r] from row r of logits, f32 [rows][width], with the argmaxes of the rows;
  // -1 if the row is not finite or has too many candidates (kMaxCandidates). Only for devices whose memory is not the
  // host's: on the CPU the sampler reads the logits.
  virtual void Sample(const float* logits, int64_t rows, int64_t width, const RowArgmax* argmaxes,
                      const SampleParams* params, int32_t* tokens) noexcept = 0;
};

// Names of the ISA units that this machine runs, best first (kernels/cpu/select.cc lists all of them).
std::span<const char* const> RunnableIsas();

// Name of the unit that runs for `isa`: one of RunnableIsas(), or "auto" (environment variable KVANTA_ISA if it is set
// and not "auto", else the best that the system permits). Throws InputError that lists the units.
const char* SelectedIsa(std::string_view isa);

// CPU ops of SelectedIsa(isa). Throws InputError that lists the units.
std::unique_ptr<Ops> MakeCpuOps(std::shared_ptr<ThreadPool> threads, const char* isa = "auto");
// The same over a given unit, which must run on this machine and outlive the ops.
std::unique_ptr<Ops> MakeCpuOps(std::shared_ptr<ThreadPool> threads, const IsaTable& isa);

}  // namespace kvanta::kernels
