"""tests/mutations.toml: every fault can still be put in, and its tests exist. tools/mutate.py runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutate import ROOT, Mutation, read_mutations

MUTATIONS = read_mutations()
GTEST = re.compile(r"\bTEST(?:_P|_F)?\((\w+),")


def test_ten_faults_in_as_many_places() -> None:
    assert len({mutation.file for mutation in MUTATIONS}) >= 10
    assert {bool(mutation.program) for mutation in MUTATIONS} == {False, True}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_a_fault_can_be_put_in_and_taken_out(mutation: Mutation, tmp_path: Path) -> None:
    before = (ROOT / mutation.file).read_bytes()
    file = tmp_path / mutation.file
    file.parent.mkdir(parents=True)
    file.write_bytes(before)
    with mutation.applied(tmp_path):
        changed = file.read_text(encoding="utf-8")
        assert changed != before.decode()
        if file.suffix == ".py":
            compile(changed, mutation.file, "exec")
        with pytest.raises(ValueError, match="not once"):
            mutation.apply(tmp_path)
    assert file.read_bytes() == before


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_its_tests_exist(mutation: Mutation) -> None:
    if not mutation.program:
        assert all((ROOT / str(each).partition("::")[0]).is_file() for each in mutation.tests)
        return
    layer = mutation.program.removesuffix("_test")
    names = set()
    for source in (ROOT / "tests" / layer).glob("*_test.cc"):
        names |= set(GTEST.findall(source.read_text(encoding="utf-8")))
    for pattern in str(mutation.tests).split(":"):
        suite = re.split(r"[./]", pattern.removeprefix("AllFormats/"))[0].strip("*")
        assert any(suite in name for name in names), f"no suite {suite} in tests/{layer}"
