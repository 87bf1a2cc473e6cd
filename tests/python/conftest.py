"""Set-up of all tests: imports from other folders, order, rotation, Ctrl-C, Ray's priority, the shipped model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub
from model_support import RecordSupport, recorder
from stories import GREEDY, PROMPT
from tiny_gguf import TinyModel, write_gguf

from kvanta import LLM
from kvanta.checkpoint.resolve import SHIPPED

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("tests/oracle", "tools", "benchmarks")]

# A run in the background inherits interrupts that are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray lowers the priority of its workers, which would get next to no CPU while other tests run.
os.environ.setdefault("RAY_worker_niceness", "0")

# The models of torch are so small that its threads mostly wait, the longer the more tests run concurrently.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take longest, or wait longest: with --dist loadfile, they then do not start last.
FIRST = (
    "test_ray_operation.py",
    "test_replicas.py",
    "test_rank_nodes.py",
    "test_gguf_models.py",
    "test_commands_of_models.py",
    "test_quantized_architectures.py",
    "test_emulated_gpu.py",
    "test_moe_oracle.py",
    "test_models_oracle.py",
    "test_config_defaults.py",
    "test_mutated_files.py",
    "test_chat_template.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-models",
        action="store_true",
        help="all combinations of class, weights and command in tests of models [each class has one in turn]",
    )
    parser.addoption("--turn", type=int, default=0, metavar="N", help="the turn without --all-models [0]")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rotation(parameter, count, turn): tests/python/conftest.py, in_turn")


def in_turn(items: list[pytest.Item], offset: int = 0) -> list[pytest.Item]:
    """Tests that run without --all-models.

    The mark `rotation(parameter, count, turn)` keeps every `count`-th value of a test's parameter; the first is number
    `turn`, or the number of the test's value of the parameter with that name; `offset`, of --turn, is added to it.
    """
    seen: dict[tuple[str, str], list[object]] = {}

    def number_of(item: pytest.Function, parameter: str) -> int:
        values = seen.setdefault((f"{item.path}::{item.originalname}", parameter), [])
        value = item.callspec.params[parameter]
        if value not in values:
            values.append(value)
        return values.index(value)

    kept: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("rotation")
        if mark is not None and isinstance(item, pytest.Function):
            parameter, count, turn = mark.args
            first = number_of(item, turn) if isinstance(turn, str) else turn
            if number_of(item, parameter) % count != (first + offset) % count:
                continue
        kept.append(item)
    return kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all_models"):
        kept = in_turn(items, config.getoption("turn"))
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories260k", kv_cache_memory_bytes="32MiB", threads=1)


@pytest.fixture(scope="module")
def story(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with stories260k, as a public repository and as a gated one, and with a tiny GGUF file."""
    with fake_hub(tmp_path) as running:
        files = {path.name: path for path in (SHIPPED / "stories260k").iterdir() if path.is_file()}
        running.add("org/stories", files)
        running.add("org/gated", files)
        running.private.add("org/gated")
        model = TinyModel()
        file = write_gguf(tmp_path / "tiny.gguf", model, model.weights())
        running.add("org/tiny-GGUF", {"tiny.gguf": file})
        sizes = ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf", "tiny-IQ8_0.gguf")
        running.add("org/sizes-GGUF", dict.fromkeys(sizes, file))
        yield running


@pytest.fixture
def record_support(request: pytest.FixtureRequest) -> RecordSupport:
    return recorder(request.node.user_properties)
