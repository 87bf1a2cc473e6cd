"""Prints tests/models/rope_golden.h: inverse frequencies as transformers computes them.

python tests/oracle/make_rope_golden.py > tests/models/rope_golden.h
"""

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HEAD_DIM = 64
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 2048,
    "short_factor": [1 + i / 32 for i in range(HEAD_DIM // 2)],
    "long_factor": [1 + i * i / 16 for i in range(HEAD_DIM // 2)],
}
CASES = {
    "kDefault": {"rope_type": "default", "rope_theta": 500000.0},
    "kLinear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "kLlama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "kYarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "kYarnUntruncated": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "kLongRopeShort": LONG_ROPE,
    "kLongRopeLong": LONG_ROPE | {"seq_len": 2049},
}


def frequencies(parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    parameters = dict(parameters)
    seq_len = parameters.pop("seq_len", None)
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=8192, rope_parameters=parameters
    )
    result: tuple[torch.Tensor, float]
    if parameters["rope_type"] == "default":
        result = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        result = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=seq_len)
    return result


def main() -> None:
    print("// Made by tests/oracle/make_rope_golden.py with transformers; do not edit.")
    print("#pragma once\n\n#include <array>\n\nnamespace kvanta::models::golden {\n")
    print("struct RopeGolden {\n  float attention_scaling;")
    print(f"  std::array<float, {HEAD_DIM // 2}> inverse;\n}};\n")
    for name, parameters in CASES.items():
        inverse, scaling = frequencies(parameters)
        values = ", ".join(f"{value:#.9g}F" for value in inverse.tolist())
        print(f"inline constexpr RopeGolden {name} = {{{scaling:#.9g}F, {{{values}}}}};")
    print("\n}  // namespace kvanta::models::golden")


if __name__ == "__main__":
    main()
