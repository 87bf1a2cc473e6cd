"""Options of the schedule: sequences and tokens of a step, its time, the order of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvanta.options.option import GENERATING, OptionGroup, option, parse_integer, parse_number, parse_tokens


def _length(value: Any) -> int:
    """A number of tokens; auto and -1 mean the model's own limit."""
    return 0 if str(value).lower() in ("auto", "-1") else parse_tokens(value)


def _step_ms(value: Any) -> float | str:
    return "auto" if str(value).lower() == "auto" else parse_number(value)


def _policy(value: Any) -> str:
    """SGLang's lpm and dfs-weight order by cached prefixes, as `shortest` does: it counts uncached tokens only."""
    name = str(value).lower()
    return {"lpm": "shortest", "dfs-weight": "shortest"}.get(name, name)


@dataclass
class BatchingOptions(OptionGroup):
    """Engine options of the group batching."""

    max_model_len: int | None = option(
        0,
        "maximum tokens of one sequence, as in 32k (default, auto: the model's limit)",
        _length,
        aliases=("context_length",),
        metavar="N",
        group="batching",
        shown=GENERATING,
    )
    max_num_seqs: int | None = option(
        64,
        "maximum sequences that run at once",
        parse_integer,
        aliases=("max_running_requests",),
        metavar="N",
        group="batching",
        shown=("serve", "bench engine"),
    )
    max_num_batched_tokens: int | None = option(
        512,
        "maximum tokens computed in one step",
        parse_tokens,
        aliases=("chunked_prefill_size",),
        metavar="N",
        group="batching",
    )
    max_step_ms: float | str | None = option(
        "auto",
        "milliseconds that a step may take while sequences decode, so that prompts stall no stream; 0: no limit "
        "(auto: twice a decode step's own time, at least 40 more than it, on a server; 0 for LLM)",
        _step_ms,
        metavar="MS",
        group="batching",
        shown=("serve",),
    )
    scheduling_policy: str = option(
        "shortest",
        "order of prompts: shortest: what remains, and none waits long; fcfs: order of arrival; priority: as shortest, "
        "and requests may have a priority",
        _policy,
        aliases=("schedule_policy",),
        choices=("shortest", "fcfs", "priority"),
        metavar="POLICY",
        group="batching",
    )
    max_prompt_delay: float | None = option(
        0,
        "seconds that a prompt may wait for shorter ones (default: four times what it takes alone)",
        parse_number,
        metavar="S",
        group="batching",
    )
    fair_by: str = option(
        "none",
        "equal parts of the tokens for each user (the field `user`) or API key: none, user, api-key",
        str.lower,
        choices=("none", "user", "api-key"),
        metavar="WHOM",
        group="batching",
        shown=("serve",),
    )
    max_num_partial_prefills: int | None = option(
        0, "prompts that are computed at the same time (0: no limit)", parse_integer, metavar="N", group="batching"
    )
    max_long_partial_prefills: int | None = option(
        0,
        "of these, prompts of more than long_prefill_token_threshold tokens (0: no limit)",
        parse_integer,
        metavar="N",
        group="batching",
    )
    long_prefill_token_threshold: int | None = option(
        0,
        "tokens above which a prompt is long, and that a step computes of it at most (0: no limit; with "
        "max_long_partial_prefills, 4 % of max_model_len)",
        parse_tokens,
        metavar="N",
        group="batching",
    )
    max_queued_requests: int | None = option(
        0,
        "maximum requests that wait to run; more are refused (0: no limit)",
        parse_integer,
        aliases=("max_num_queued_reqs",),
        metavar="N",
        group="batching",
    )
