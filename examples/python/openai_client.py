"""The package openai as a client of `kvanta serve`: a text, a stream, and log-probabilities.

pip install 'kvanta[serve]' openai
python examples/python/openai_client.py [MODEL]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI


@contextmanager
def server(model: str) -> Iterator[str]:
    """The address of a server, which ends with the block."""
    command = [sys.executable, "-m", "kvanta", "serve", model, "--port", "0", "--kv-cache-dtype", "int8"]
    command += ["--max-model-len", "512", "--no-log-requests"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:  # the line of a server that is ready has its address
                if address := re.search(r"https?://[^\s,]+", line):
                    yield address[0]
                    return
            raise SystemExit("the server did not start")
        finally:
            process.terminate()


def main(model: str = "smollm2") -> None:
    with server(model) as address, OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        name = client.models.list().data[0].id
        text = client.completions.create(model=name, prompt="Once upon a time", max_tokens=16, temperature=0)
        print(f"{name}: {text.choices[0].text!r}")
        stream = client.completions.create(model=name, prompt="One day", max_tokens=16, temperature=0, stream=True)
        print("stream:", "|".join(event.choices[0].text for event in stream))
        scored = client.completions.create(model=name, prompt="One day", max_tokens=1, temperature=0, logprobs=3)
        print("next token:", scored.choices[0].logprobs and scored.choices[0].logprobs.top_logprobs)


if __name__ == "__main__":
    main(*sys.argv[1:])
