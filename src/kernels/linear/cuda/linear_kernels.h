// Kernel dispatch of linear layers: calls launcher.Launch<Kernel>(op) with the kernel for `op`, which has Shape(op) and
// Run(op). Used by nvcc and the emulation.
#pragma once

#include "kernels/linear/cuda/linear_kernel.h"
#include "kernels/linear/cuda/linear_tile_kernel.h"

namespace kvanta::kernels::cuda {

template <class Panel, class Launcher>
void LaunchTiles(const LinearOp& op, Launcher launcher) {
  switch (op.tile) {
    case ProductTile::k1x1:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k1x1>>(op);
    case ProductTile::k2x1:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k2x1>>(op);
    case ProductTile::k2x4:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k2x4>>(op);
    case ProductTile::k4x8:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k4x8>>(op);
    case ProductTile::k8x16:
      return launcher.template Launch<LinearTileBlock<Panel>>(op);
  }
}

template <class Launcher>
void LaunchLinearKernel(const LinearOp& op, Launcher launcher) {
  if (!op.weight.panels) return launcher.template Launch<F32Linear>(op);
  switch (op.weight.kind) {
    case PanelKind::kBf16:
      return LaunchTiles<ElementPanel<PanelKind::kBf16>>(op, launcher);
    case PanelKind::kF16:
      return LaunchTiles<ElementPanel<PanelKind::kF16>>(op, launcher);
    case PanelKind::kInt8:
      return LaunchTiles<Int8Panel>(op, launcher);
    case PanelKind::kInt4:
      return LaunchTiles<Int4Panel>(op, launcher);
    case PanelKind::kE4m3Groups:
      return LaunchTiles<GroupPanel<PanelKind::kE4m3Groups>>(op, launcher);
    case PanelKind::kInt8Groups:
      return LaunchTiles<GroupPanel<PanelKind::kInt8Groups>>(op, launcher);
    case PanelKind::kInt4Groups:
      return LaunchTiles<GroupPanel<PanelKind::kInt4Groups>>(op, launcher);
    case PanelKind::kMxfp4:
      return LaunchTiles<GroupPanel<PanelKind::kMxfp4>>(op, launcher);
    case PanelKind::kMxfp8:
      return LaunchTiles<GroupPanel<PanelKind::kMxfp8>>(op, launcher);
    case PanelKind::kNvfp4:
      return LaunchTiles<GroupPanel<PanelKind::kNvfp4>>(op, launcher);
    case PanelKind::kBlocks4:
      return LaunchTiles<GroupPanel<PanelKind::kBlocks4>>(op, launcher);
    case PanelKind::kBlocks8:
      return LaunchTiles<GroupPanel<PanelKind::kBlocks8>>(op, launcher);
  }
}

}  // namespace kvanta::kernels::cuda
