"""Layers of GGUF files that predict several tokens."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata


def leave_out_predicted_layers(metadata: Metadata, config: dict[str, Any]) -> None:
    """Takes them off num_hidden_layers: the file counts them as blocks."""
    predicted, blocks = metadata.count("nextn_predict_layers"), config["num_hidden_layers"]
    if predicted >= blocks:
        raise InputError(f"{metadata.path} has {blocks} blocks, all of which predict further tokens")
    config["num_nextn_predict_layers"] = predicted
    config["num_hidden_layers"] -= predicted
