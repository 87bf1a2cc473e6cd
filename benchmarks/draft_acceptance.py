"""Acceptance of a draft model's tokens, by the way of drawing them, for several sampling parameters.

    python benchmarks/draft_acceptance.py MODEL DRAFT_MODEL --json docs/results/draft-acceptance.json

Teacher-forced through the same text, both models give their distributions p and q at every position. From these follows
the probability that a draft token is accepted there, if it is
* the draft model's most likely token: p(argmax q);
* drawn with the random number with which the model's own token is drawn, as Kvanta does (ADR 0057): the measure of
  random numbers for which both draws give the same token;
* drawn independently and accepted by rejection sampling, as vLLM does: the sum of min(p, q).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvanta import LLM
from kvanta.evaluate.passages import SHIPPED_TEXT
from kvanta.terminal.tables import render_table

Probs = NDArray[np.float64]

SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
)


def intervals(logits: Probs, temperature: float, top_p: float = 1.0, top_k: float = 0) -> tuple[Probs, Probs, Probs]:
    """Probabilities of the tokens, and the interval of random numbers for which each is drawn; as the sampler does."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.arange(len(p))
    if top_p < 1 or top_k:
        order = np.argsort(-p, kind="stable")[: int(top_k) or None]
        mass = np.cumsum(p[order])
        order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    kept = np.zeros_like(p)
    kept[order] = p[order] / p[order].sum()
    begin = np.zeros_like(p)
    begin[order] = np.cumsum(kept[order]) - kept[order]
    return kept, begin, begin + kept


def acceptance(target: Probs, draft: Probs, setting: dict[str, float]) -> tuple[float, float, float]:
    """Probabilities of acceptance: most likely token, same random number, rejection sampling."""
    p, p_begin, p_end = intervals(target, **setting)
    q, q_begin, q_end = intervals(draft, **setting)
    same = np.minimum(p_end, q_end) - np.maximum(p_begin, q_begin)
    return float(p[q.argmax()]), float(np.maximum(same, 0).sum()), float(np.minimum(p, q).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft_model")
    parser.add_argument("--text", type=Path, default=SHIPPED_TEXT, metavar="FILE", help="[a shipped novel]")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="positions [400]")
    parser.add_argument(
        "--draft-weight-dtype", default="auto", metavar="DTYPE", help="of the draft model's weights [auto]"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = LLM(options.model, max_num_seqs=1)
    draft = LLM(options.draft_model, max_num_seqs=1, weight_dtype=options.draft_weight_dtype)
    tokens = model.tokenizer.encode(options.text.read_text(encoding="utf-8")[: 8 * options.tokens])[: options.tokens]
    pairs = list(zip(model.logits(tokens), draft.logits(tokens), strict=True))
    rows = []
    for setting in SETTINGS:
        found = [acceptance(p.astype(np.float64), q.astype(np.float64), setting) for p, q in pairs]
        means = np.mean(found, axis=0)
        name = ", ".join(f"{key} {value:g}" for key, value in setting.items())
        rows.append({"sampling": name, "most_likely": means[0], "same_number": means[1], "rejection": means[2]})
    cells = [[str(row["sampling"]), *(f"{float(value):.3f}" for value in list(row.values())[1:])] for row in rows]
    print(render_table(["sampling", "most likely", "same number", "rejection"], cells))
    if options.json:
        report = {key: getattr(options, key) for key in ("model", "draft_model", "draft_weight_dtype")}
        text = json.dumps({**report, "tokens": len(tokens), "rows": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
