"""Costs of one replica, as benchmarks/fleet_costs.py measures them on a machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.json_file import read_json_file
from kvanta.params.checks import one_line


@dataclass(frozen=True)
class ReplicaCosts:
    """Seconds of a step: one part for the step, one for each token and each token that attention reads."""

    step_s: float
    """A step with one sequence that decodes, at depth 0: reads all weights."""
    prefill_token_s: float
    """A prompt token at depth 0, in full steps."""
    prefill_depth_s: float = 0.0
    """Additional cost for each token before it."""
    decode_sequence_s: float = 0.0
    """A further sequence that decodes in the step."""
    decode_depth_s: float = 0.0
    """Additional cost for each token before the decoded one."""
    load_bytes_per_s: float = 1e9
    """Rate at which pages of a shared store are read."""
    load_s: float = 0.0
    """Lookup and first answer of the store."""
    message_s: float = 0.0
    """The replica's work outside the step for each token that it sends."""
    front_s: float = 0.0
    """Work of the front, which all replicas share, on a request, one after the other."""
    request_s: float = 0.0
    """A request's further time to the first token, which delays no other: messages, network."""
    replica_request_s: float = 0.0
    """Replica's work on a request before its first step, on shared CPUs."""
    front_message_s: float = 0.0
    """Front's work on a token, on shared CPUs."""
    client_request_s: float = 0.0
    """Serial work on a request by clients on the same machine, on shared CPUs."""
    client_message_s: float = 0.0
    """Clients' work on a token, on shared CPUs."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_s: float | None = None
    """Time that a step may take while sequences decode, as --max-step-ms: 0: any; None: the engine's own limit."""

    def prefill_s(self, tokens: int, depth: int) -> float:
        """Seconds of a step for `tokens` prompt tokens that follow `depth` others."""
        return tokens * (self.prefill_token_s + self.prefill_depth_s * (depth + tokens / 2))

    def prefill_tokens(self, seconds: float, depth: int) -> int:
        """Prompt tokens that a step computes in `seconds`, after `depth` others."""
        first, growth = self.prefill_token_s + self.prefill_depth_s * depth, self.prefill_depth_s / 2
        if growth * seconds < 1e-9 * first**2:
            return int(seconds / first)
        return int((math.sqrt(first**2 + 4 * growth * max(0.0, seconds)) - first) / (2 * growth))

    def step_limit_s(self, decodes_s: float, streams: bool, prompts: int) -> float:
        """Time of a step whose sequences take decodes_s to decode, as src/scheduler/step_time.cc limits it."""
        if self.max_step_s == 0:
            return math.inf
        if streams:
            share = min(max(prompts / _FEW_PROMPTS, 1.0), _MAX_SHARE)
            return self.max_step_s or max(2 * decodes_s, decodes_s + share * _PROMPT_S)
        return 4 * (self.max_step_s or max(2 * self.step_s, _IDLE_S))

    def decode_s(self, sequences: int, depth: float) -> float:
        """A step's sequences that decode, with `depth` tokens before them altogether; without the step itself."""
        sent = sequences * self.message_s
        return max(0, sequences - 1) * self.decode_sequence_s + depth * self.decode_depth_s + sent


_PROMPT_S, _IDLE_S = 0.04, 0.1
_FEW_PROMPTS, _MAX_SHARE = 4, 6
_WHOLE = ("max_num_seqs", "max_num_batched_tokens")


def read_costs(source: str | Mapping[str, Any]) -> ReplicaCosts:
    """From a JSON file with ReplicaCosts' fields, alone or under `costs`. Raises InputError."""
    values = source if isinstance(source, Mapping) else read_json_file(Path(source), dict)
    where = "costs" if isinstance(source, Mapping) else str(source)
    values = values.get("costs", values)
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: costs must be an object, got {one_line(values)}")
    fields = {field.name: field for field in dataclasses.fields(ReplicaCosts)}
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise InputError(f"{where}: {one_line(unknown[0])} is no cost; there are: {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if missing:
        raise InputError(f"{where}: {missing[0]} is missing")
    for name, value in values.items():
        if value is None and name == "max_step_s":
            continue
        number = type(value) is int if name in _WHOLE else type(value) in (int, float) and math.isfinite(value)
        lowest = 1 if name in _WHOLE else 0
        positive = name in ("step_s", "prefill_token_s", "load_bytes_per_s")
        if not number or value < lowest or (positive and value == 0):
            kind = "whole number from 1 on" if name in _WHOLE else "number above 0" if positive else "number from 0 on"
            raise InputError(f"{where}: {name} must be a {kind}, got {one_line(value)}")
    return ReplicaCosts(**values)
