"""Checkpoints with a layer that predicts further tokens (MTP), and its predictions by transformers' modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tiny_models
import torch
import transformers
from numpy.typing import NDArray

# Settings of a model whose only layer is one of attention, like that of the predictor.
ONE_LAYER: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "Qwen3Next": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "Glm4Moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "DeepseekV3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "Mellum": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
}


@dataclass
class Predictor:
    """The model, and the parts of its predictor; `trunk`: its layer and last norm, as a model of one layer."""

    model: Any
    embedding_norm: Any
    hidden_norm: Any
    projection: torch.Tensor
    trunk: Any

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Row i predicts token i + 2, from the tokens before."""
        with torch.no_grad():
            ids = torch.tensor(tokens)[None]
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            embedded = self.model.model.embed_tokens(ids[:, 1:])
            pairs = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
            output = self.trunk.model(inputs_embeds=pairs @ self.projection.T, use_cache=False).last_hidden_state
            result: NDArray[np.float32] = self.model.lm_head(output)[0].numpy()
        return result


def make_predictor(architecture: str, **settings: Any) -> Predictor:
    """A random model and predictor."""
    model: Any = tiny_models.make_model(architecture, **settings)
    trunk = tiny_models.make_model(architecture, 1, **{**settings, **ONE_LAYER[architecture]})
    generator = torch.Generator().manual_seed(2)
    norms = []
    for _ in range(2):
        norm = copy.deepcopy(model.model.norm)
        with torch.no_grad():
            norm.weight.add_(0.2 * torch.randn(norm.weight.shape, generator=generator))
        norms.append(norm)
    width = model.config.hidden_size
    projection = torch.randn((width, 2 * width), generator=generator) / (2 * width) ** 0.5
    return Predictor(model, norms[0], norms[1], projection, trunk)


def save(predictor: Predictor, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """The model with its predictor, under the names of the hub's checkpoints."""
    model: transformers.PreTrainedModel = predictor.model
    tiny_models.save(model, folder, dtype)
    tiny_models.save(predictor.trunk, folder / "trunk", dtype)
    trunk = safetensors.torch.load_file(folder / "trunk" / "model.safetensors")
    if type(model).__name__.startswith(("Qwen3", "Mellum")):
        outer, layer = "mtp.", "mtp.layers.0."
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    else:
        outer = layer = f"model.layers.{model.config.num_hidden_layers}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if not type(model).__name__.startswith("Qwen3"):
        tiny_models.edit_config(folder, num_nextn_predict_layers=1)
    parts = (predictor.embedding_norm.weight, predictor.hidden_norm.weight, predictor.projection)
    tensors = {f"{outer}{name}.weight": part.detach().to(dtype) for name, part in zip(names, parts, strict=False)}
    tensors[f"{outer}{names[3]}.weight"] = trunk["model.norm.weight"]
    for name, value in trunk.items():
        if name.startswith("model.layers.0."):
            tensors[layer + name.removeprefix("model.layers.0.")] = value
    file = folder / "model.safetensors"
    tensors |= safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})
