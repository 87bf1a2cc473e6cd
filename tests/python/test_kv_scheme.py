"""KvScheme as Python sees it."""

from kvanta import _core


def test_exact_open_includes_schemes_that_read_two_pages_exactly() -> None:
    assert not _core.KvScheme.parse("int4+exact=none").exact_open
    assert _core.KvScheme.parse("int4+exact=open").exact_open
    assert _core.KvScheme.parse("int4+exact=2").exact_open
