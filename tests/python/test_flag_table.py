"""Options of vLLM, SGLang and Aphrodite: each is honoured, accepted with a reason or refused; docs/flags.md says so."""

from __future__ import annotations

import zipfile
from pathlib import Path

from flag_lists import read_wheel
from flag_table import DOCUMENT, ENGINES, counts, fates, render

from kvanta.options.foreign import IGNORED, LISTS, REFUSED
from kvanta.options.ignored import IGNORED_GROUPS
from kvanta.options.refused import REFUSED_GROUPS, SHORT_FLAGS


def test_no_option_is_unknown() -> None:
    table = fates()
    for engine, least in (("vllm", 300), ("sglang", 500), ("aphrodite", 280)):
        kinds = counts(table)[engine]
        assert sum(kinds.values()) > least
        unknown = [(flag.names, found) for flag, found in table[engine] if found.kind == "unknown"]
        assert not unknown, ENGINES[engine]
    without = [flag for rows in table.values() for flag, found in rows if found.kind != "honoured" and not found.reason]
    assert not without
    assert DOCUMENT.read_text(encoding="utf-8") == render(table), "run tools/flag_table.py"


def test_every_name_is_in_one_group() -> None:
    names = [
        name for group in (*IGNORED_GROUPS, *REFUSED_GROUPS) for name in f"{group.switches} {group.values}".split()
    ]
    assert len(names) == len(set(names))
    assert {name for name in IGNORED if IGNORED[name]} >= LISTS
    assert {*names} >= SHORT_FLAGS.keys()
    assert not IGNORED.keys() & REFUSED.keys()


def test_lists_are_read_from_sources(tmp_path: Path) -> None:
    sources = {
        "sglang/srt/server_args.py": (
            "p.add_argument('--config', type=str)\np.add_argument('--on', action='store_true')"
        ),
        "sglang/srt/arg_groups/fields/model.py": (
            "class Model:\n"
            "    model_path: A[str, Arg(help='x', aliases=['--model'])]\n"
            "    fast: A[bool, 'x'] = False\n"
            "    sizes: A[Optional[List[int]], 'x'] = None\n"
            "    hidden: A[int, Arg(no_cli=True)] = 1\n"
            "    plain: int = 1\n"
        ),
    }
    wheel = tmp_path / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    assert [*read_wheel(wheel).lines()] == ["--config =", "--fast", "--model --model-path =", "--on", "--sizes =+"]
