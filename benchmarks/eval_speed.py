"""Cost of evaluating a cache format, compared with the plain prefill of the same tokens.

    python benchmarks/eval_speed.py smollm2 --text wiki.test.raw --json docs/results/eval-speed.json

Both are measured in alternation, --pairs times; results are medians. The time of an evaluation includes everything but
the reference, which is computed once for all formats: loading the model, logits of half of the tokens over the whole
vocabulary, and their divergence from the reference. The time of a prefill is that of computing the prompts alone. All
evaluations must find the same divergence, and all prefills the same next tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from kvanta import LLM, SamplingParams
from kvanta.evaluate import Evaluation, Settings


def evaluation(options: argparse.Namespace, scheme: str) -> Evaluation:
    """An evaluation whose reference is computed."""
    engine = {} if options.threads is None else {"threads": options.threads}
    settings = Settings(
        [scheme], options.text, context=options.context, tokens=options.tokens, engine={**engine, "max_num_seqs": 8}
    )
    result = Evaluation(options.model, settings)
    result.prepare()
    return result


def evaluated(work: Evaluation) -> tuple[float, float]:
    """Seconds and mean divergence."""
    begin = time.perf_counter()
    ((_, row),) = work.run()
    return time.perf_counter() - begin, float(row["kl_mean"])


def prefilled(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds and the next token of each prompt."""
    begin = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - begin, [output.outputs[0].token_ids for output in outputs]


def measure(options: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """One row of the report."""
    work = evaluation(options, scheme)
    prompts = [list(passage.tokens[:-1]) for passage in work.passages]
    evaluations, prefills = [], []
    for _ in range(options.pairs):
        evaluations.append(evaluated(work))
        llm, _ = work.factory.engine(scheme)
        prefills.append(prefilled(llm, prompts))
        del llm
    if len({kl for _, kl in evaluations}) > 1 or any(tokens != prefills[0][1] for _, tokens in prefills):
        raise SystemExit(f"error: {scheme}: not every run found the same")
    times = [one / other for (one, _), (other, _) in zip(evaluations, prefills, strict=True)]
    return {
        "format": scheme,
        "tokens": sum(map(len, prompts)),
        "evaluation_s": median(seconds for seconds, _ in evaluations),
        "prefill_s": median(seconds for seconds, _ in prefills),
        "times": median(times),
        "kl_mean": evaluations[0][1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", help="text file [the shipped text]")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, help="CPU threads [all]")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for scheme in options.formats:
        rows.append(measure(options, scheme))
        print({key: round(value, 5) if isinstance(value, float) else value for key, value in rows[-1].items()})
    report = {key: getattr(options, key) for key in ("model", "text", "context", "threads", "pairs")}
    if options.json:
        options.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
