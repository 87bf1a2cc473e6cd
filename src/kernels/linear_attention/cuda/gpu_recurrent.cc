#include "kernels/linear_attention/cuda/gpu_recurrent.h"

namespace kvanta::kernels {
namespace {

// The runs in closed form: one, or q, k and v of each head of keys.
cuda::KeyHeadGroups GroupsOf(const GatedDeltaNetOp& op) noexcept {
  if (op.runs.size() == 1) return {};
  const int64_t stride = op.runs.size() > 3 ? op.runs[3].projected - op.runs[0].projected : op.projected_stride;
  return {.stride = stride,
          .key_width = op.shape.KeyWidth(),
          .k_dim = op.shape.k_dim,
          .value_width = op.shape.ValueWidth() / op.shape.k_heads};
}

}  // namespace

void GpuGatedDeltaNet(const GatedDeltaNetOp& op, CudaContext& gpu) noexcept {
  const GatedDeltaNetShape& shape = op.shape;
  const cuda::DeviceStates states = cuda::DeviceStatesOf(op.states);
  gpu.Run(cuda::CausalConvOp{.states = states,
                             .state_offset = shape.RuleFloats(),
                             .rows = op.rows,
                             .input = op.projected + op.runs[0].projected,
                             .stride = op.projected_stride,
                             .groups = GroupsOf(op),
                             .channels = shape.ConvWidth(),
                             .taps = shape.conv_width,
                             .weights = op.conv,
                             .silu = true,
                             .out = op.mixed});
  gpu.Run(cuda::StateScanOp{.states = states,
                            .rule = shape.channel_decay ? cuda::StateRule::kChannelDelta : cuda::StateRule::kDelta,
                            .heads = shape.v_heads,
                            .state_rows = shape.k_dim,
                            .state_columns = shape.v_dim,
                            .key_heads = shape.k_heads,
                            .tiled_heads = shape.tiled_v_heads,
                            .mixed = op.mixed,
                            .mixed_stride = shape.ConvWidth(),
                            .q = 0,
                            .k = shape.KeyWidth(),
                            .v = 2 * shape.KeyWidth(),
                            .gates = op.gates,
                            .gates_stride = op.gates_stride,
                            .b = op.b,
                            .a = op.a,
                            .channel_gates = op.channel_gates,
                            .channel_gates_stride = op.channel_gates_stride,
                            .dt_bias = op.dt_bias,
                            .rates = op.decay,
                            .lower_bound = shape.decay_lower_bound,
                            .out = op.out});
  if (op.states_only) return;
  cuda::GatedNormOp norm{.x = op.out,
                         .rows = op.rows,
                         .groups = shape.v_heads,
                         .width = shape.v_dim,
                         .gates = op.projected,
                         .gates_stride = op.projected_stride,
                         .gate = op.z,
                         .weight = op.norm,
                         .eps = op.eps};
  if (shape.channel_decay) {
    norm.gates = op.output_gates;
    norm.gates_stride = shape.ValueWidth();
    norm.gate = {.group_stride = shape.v_dim};
    norm.silu = false;
  }
  gpu.Run(norm);
}

void GpuMamba2(const Mamba2Op& op, CudaContext& gpu) noexcept {
  const Mamba2Shape& shape = op.shape;
  const cuda::DeviceStates states = cuda::DeviceStatesOf(op.states);
  const HeadOffsets dt{.group_stride = 1};
  gpu.Run(cuda::CausalConvOp{.states = states,
                             .state_offset = shape.ScanFloats(),
                             .rows = op.rows,
                             .input = op.inputs,
                             .stride = op.stride,
                             .groups = {},
                             .channels = shape.ConvWidth(),
                             .taps = shape.conv_width,
                             .weights = op.conv,
                             .bias = op.conv_bias,
                             .silu = true,
                             .out = op.mixed});
  gpu.Run(cuda::StateScanOp{.states = states,
                            .rule = cuda::StateRule::kMamba2,
                            .heads = shape.heads,
                            .state_rows = shape.state_size,
                            .state_columns = shape.head_dim,
                            .key_heads = shape.groups,
                            .mixed = op.mixed,
                            .mixed_stride = shape.ConvWidth(),
                            .q = shape.Width() + int64_t{shape.groups} * shape.state_size,
                            .k = shape.Width(),
                            .v = 0,
                            .gates = op.inputs + shape.ConvWidth(),
                            .gates_stride = op.stride,
                            .b = dt,
                            .a = dt,
                            .dt_bias = op.dt_bias,
                            .rates = op.decay,
                            .d = op.d,
                            .dt_scale = op.dt_scale,
                            .min_dt = shape.min_dt,
                            .max_dt = shape.max_dt,
                            .out = op.out});
  if (op.z == nullptr) return;
  gpu.Run(cuda::GatedNormOp{.x = op.out,
                            .rows = op.rows,
                            .groups = shape.groups,
                            .width = shape.GroupWidth(),
                            .gates = op.z,
                            .gates_stride = op.stride,
                            .gate = {.group_stride = shape.GroupWidth()},
                            .gate_scale = op.z_scale,
                            .weight = shape.gate == Mamba2Gate::kNoNorm ? nullptr : op.norm,
                            .weight_stride = shape.GroupWidth(),
                            .norms_gated_values = shape.gate == Mamba2Gate::kGateBeforeNorm,
                            .eps = op.eps});
}

void GpuShortConv(const ShortConvOp& op, CudaContext& gpu) noexcept {
  const int64_t channels = op.shape.channels;
  const bool states_only = op.x == nullptr;
  if (!states_only) {  // before the convolution, whose threads read each other's rows
    gpu.Run(cuda::MulOp{
        .x = op.b, .x_stride = op.stride, .by = op.x, .by_stride = op.stride, .rows = op.rows, .width = channels});
  }
  gpu.Run(cuda::CausalConvOp{.states = cuda::DeviceStatesOf(op.states),
                             .rows = op.rows,
                             .input = op.b,
                             .stride = op.stride,
                             .groups = {},
                             .channels = channels,
                             .taps = op.shape.conv_width,
                             .weights = op.conv,
                             .bias = op.bias,
                             .gate = op.c,
                             .out = states_only ? nullptr : op.out});
}

}  // namespace kvanta::kernels
