"""Speed of speculative decoding, next to plain decoding.

    python benchmarks/speculation.py smollm2 --json docs/results/speculation.json
    python benchmarks/speculation.py random-hybrid

Three kinds of work, several prompts of each, one request at a time or --batch at once: editing and summarising a
passage (the answer repeats much of the prompt), and writing on from it (sampled with seeds, so that it repeats little).
random-hybrid: a random model with the layers of Qwen3.5, whose greedy text repeats itself and whose sampled text does
not.
Plain and speculative runs alternate, --pairs times; figures are medians of decode steps alone, without prompts. All
runs must give the same tokens and log-probabilities to the bit, which is checked first. --rows: time of a plain step of
this many sequences relative to one sequence: about the cost of a draft of one token less.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_model import QWEN35_HYBRID, write_random_model

from kvanta import LLM, SamplingParams
from kvanta.evaluate.passages import SHIPPED_TEXT

_PASSAGES = 4
_EDIT = "Copy the following text, and write Jack in place of every Jim. Give the text alone.\n\n"
_SUMMARY = "Summarise the following text in a few sentences, in its own words.\n\n"


def random_workloads(tokens: int) -> dict[str, list[tuple[list[int], SamplingParams]]]:
    """The same of a model whose words mean nothing."""
    random = np.random.default_rng(4)
    prompts = [random.integers(300, 30000, 200).tolist() for _ in range(_PASSAGES)]
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    # The last token is by far the most likely one; at this temperature the others together are likelier.
    sampled = [
        SamplingParams(temperature=4.0, seed=index, max_tokens=tokens, ignore_eos=True) for index in range(_PASSAGES)
    ]
    return {
        "repetitive": [(prompt, greedy) for prompt in prompts],
        "other text": list(zip(prompts, sampled, strict=True)),
    }


def workloads(llm: LLM, tokens: int, characters: int) -> dict[str, list[tuple[list[int], SamplingParams]]]:
    """Prompts with their parameters, by kind of work."""
    text = SHIPPED_TEXT.read_text(encoding="utf-8")
    step = (len(text) - characters) // _PASSAGES
    passages = [text[start : start + characters] for start in range(0, step * _PASSAGES, step)]
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens)

    def ask(task: str) -> list[tuple[list[int], SamplingParams]]:
        if llm.tokenizer.chat_template is None:
            return [(llm.tokenizer.encode(task + passage), greedy) for passage in passages]
        chats = ([{"role": "user", "content": task + passage}] for passage in passages)
        return [(llm.chat_prompt(chat).token_ids, greedy) for chat in chats]

    def write_on(index: int) -> tuple[list[int], SamplingParams]:
        sampled = SamplingParams(temperature=1.0, seed=index, max_tokens=tokens, ignore_eos=True)
        return llm.tokenizer.encode(passages[index]), sampled

    return {"editing": ask(_EDIT), "summary": ask(_SUMMARY), "new text": [write_on(i) for i in range(_PASSAGES)]}


def decode(llm: LLM, work: Sequence[tuple[list[int], SamplingParams]], batch: int) -> tuple[list[Any], int, float]:
    """Texts with their log-probabilities, tokens that decode steps made, and seconds of these steps."""
    texts, tokens, seconds = [], 0, 0.0
    for first in range(0, len(work), batch):
        streams = [llm.stream(prompt, params) for prompt, params in work[first : first + batch]]
        outputs = [next(stream)[1].outputs[0] for stream in streams]  # they grow; the prompts have been read now
        tokens -= sum(len(output.token_ids) for output in outputs)
        before = llm.stats()["seconds_total"]
        for stream in streams:
            collections.deque(stream, maxlen=0)
        seconds += llm.stats()["seconds_total"] - before
        texts += [(output.token_ids, output.logprobs) for output in outputs]
        tokens += sum(len(output.token_ids) for output in outputs)
    return texts, tokens, seconds


def verify(plain: LLM, speculating: LLM, work: Sequence[tuple[list[int], SamplingParams]], batch: int) -> None:
    """Exits unless both give the same bits."""
    with_logprobs = [(prompt, dataclasses.replace(params, logprobs=2)) for prompt, params in work]
    if decode(plain, with_logprobs, batch)[0] != decode(speculating, with_logprobs, batch)[0]:
        raise SystemExit("error: tokens or log-probabilities differ between plain and speculative decoding")


def measure(plain: LLM, speculating: LLM, name: str, work: Any, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the report."""
    verify(plain, speculating, work, options.batch)
    before = speculating.stats()
    rates: dict[str, list[float]] = {"plain": [], "speculative": []}
    ratios = []
    for _ in range(options.pairs):
        for kind, llm in (("plain", plain), ("speculative", speculating)):
            _, tokens, seconds = decode(llm, work, options.batch)
            rates[kind].append(tokens / seconds)
        ratios.append(rates["speculative"][-1] / rates["plain"][-1])
    after = speculating.stats()

    def gained(key: str) -> int:
        return int(after["speculation"][key]) - int(before["speculation"][key])

    return {
        "work": name,
        "plain_tokens_per_s": median(rates["plain"]),
        "speculative_tokens_per_s": median(rates["speculative"]),
        "ratio": median(ratios),
        "draft_tokens": gained("draft_tokens") // options.pairs,
        "accepted_tokens": gained("accepted_tokens") // options.pairs,
        "generated_tokens": (after["generated_tokens"] - before["generated_tokens"]) // options.pairs,
    }


def step_costs(llm: LLM, rows: Sequence[int], prompt: list[int]) -> list[dict[str, float]]:
    """Times of decode steps with this many sequences."""
    params = SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False)
    costs = []
    for count in rows:
        before = llm.stats()
        llm.generate([prompt] * count, [params] * count, use_tqdm=False)
        after = llm.stats()
        seconds = (after["seconds_total"] - before["seconds_total"]) / (after["steps"] - before["steps"])
        costs.append({"rows": count, "seconds": seconds})
    return [{**cost, "times_first": cost["seconds"] / costs[0]["seconds"]} for cost in costs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--speculative-config", default='{"method": "ngram"}', metavar="JSON")
    parser.add_argument("--kv-cache-dtype", default="int4", metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="maximum tokens of a text [200]")
    parser.add_argument("--characters", type=int, default=1200, metavar="N", help="length of a passage [1200]")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="requests at once [1]")
    parser.add_argument("--threads", type=int, help="CPU threads [all]")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[], metavar="N", help="sequences of a step [none]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "random-hybrid":
            model: str | Path = write_random_model(Path(folder) / "model", QWEN35_HYBRID, gain=0.02)
        else:
            model = options.model
        compare(model, options)
    return 0


def compare(model: str | Path, options: argparse.Namespace) -> None:
    """Prints the rows of the report, and writes it."""
    common = {"kv_cache_dtype": options.kv_cache_dtype, "max_num_seqs": options.batch, "threads": options.threads}
    plain = LLM(model, **common)
    speculating = LLM(model, speculative_config=options.speculative_config, **common)
    rows = []
    is_random = options.model == "random-hybrid"
    work_of_kinds = (
        random_workloads(options.tokens) if is_random else workloads(plain, options.tokens, options.characters)
    )
    for name, work in work_of_kinds.items():
        rows.append(measure(plain, speculating, name, work, options))
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    costs = []
    if options.rows:
        del plain, speculating
        batched = LLM(model, **{**common, "max_num_seqs": max(options.rows)})
        costs = step_costs(batched, options.rows, batched.tokenizer.encode("Once upon a time"))
        print(" ".join(f"{cost['rows']}: {cost['times_first']:.2f}" for cost in costs))
    report = {key: getattr(options, key) for key in ("model", "kv_cache_dtype", "speculative_config", "batch", "pairs")}
    if options.json:
        options.json.write_text(
            json.dumps({**report, "rows": rows, "step_costs": costs}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    sys.exit(main())
