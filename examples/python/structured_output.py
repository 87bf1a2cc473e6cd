"""A text that is JSON of a schema: the answer is read without a parser that must forgive.

pip install 'kvanta[structured]'
python examples/python/structured_output.py [MODEL]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from kvanta import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "sound": {"enum": ["woof", "meow", "moo"]},
    },
    "required": ["name", "legs", "sound"],
}


@dataclass
class Animal:
    name: str
    legs: int
    sound: str


def main(model: str = "smollm2") -> None:
    llm = LLM(model, kv_cache_dtype="int8", max_model_len=512)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=120, temperature=0.0, seed=1
    )
    (output,) = llm.generate("A cow as JSON with its name, legs and sound: ", params)
    print(Animal(**json.loads(output.outputs[0].text)))


if __name__ == "__main__":
    main(*sys.argv[1:])
