"""benchmarks/more_users.py on the shipped model: it finds what the plan says, and that one more does not fit."""

import more_users
import pytest

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.fleet.plan import plan

PROMPT, OUTPUT, MEMORY = 96, 32, 200 * 1024


@pytest.mark.parametrize("guess", [1, 9])
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_the_most_users_are_found_from_below_and_from_above(name: str, guess: int) -> None:
    folder = str(resolve_model("stories260k").path)
    options = {"kv_cache_dtype": name, "kv_cache_memory_bytes": MEMORY, "max_model_len": PROMPT + OUTPUT}
    options |= {"block_size": 16, "threads": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 256}
    engines = []

    def make_engine(most: int) -> _core.Engine:
        engines.append(_core.Engine(engine_config(folder, {**options, "max_num_seqs": most})))
        return engines[-1]

    held = more_users.most_users(make_engine, more_users.Users(PROMPT, OUTPUT, 512), guess, crowd=12)
    planned = plan(folder, formats=[name], context=PROMPT + OUTPUT, options={"block_size": 16})["formats"][0]
    assert held.users == MEMORY // planned["sequence_bytes"]
    assert (held.crowd.most_decoding, held.crowd.preemptions) == (held.users, 0)
    assert held.crowd.decode_seconds
    assert held.one_more.users == held.users + 1
    assert not held.one_more.holds(held.users + 1)
    for engine in engines:  # no pages stay in use, not even by requests that were given up
        assert engine.stats()["running"] == engine.stats()["waiting"] == engine.stats()["pages_used"] == 0
