"""Tests of the checkers in tools/: each must fail on a violation in a small tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import check_sizes
import check_wheel
import lint
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
LICENSES = sorted((TOOLS.parent / "licenses").glob("*.txt"))


def run(tool: str, *arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, TOOLS / tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree without violations: two layers, a public header of each."""
    write(tmp_path, "src/LAYERS", "# low\nbase include/kvanta/error.h\nkernels\nengine include/kvanta/engine.h\n")
    write(tmp_path, "include/kvanta/error.h", "#include <string>\n")
    write(tmp_path, "include/kvanta/engine.h", '#include "kvanta/error.h"\n')
    write(tmp_path, "src/base/text.h", "")
    write(tmp_path, "src/kernels/cuda/device.cc", "#include <cuda_runtime.h>\n")
    write(tmp_path, "src/engine/loop.cc", '#include "kvanta/engine.h"\n#include "base/text.h"\n')
    write(tmp_path, "python/kvanta/LAYERS", "# low\nerrors\ntext    words\nserver/http\n__init__\nserver\n")
    write(tmp_path, "python/kvanta/__init__.py", "from kvanta.errors import InputError\n")
    write(tmp_path, "python/kvanta/errors.py", "from kvanta import _core\n")
    write(tmp_path, "python/kvanta/text/__init__.py", "")
    write(tmp_path, "python/kvanta/text/words.py", "from kvanta import errors\n")
    write(tmp_path, "python/kvanta/server/__init__.py", "import kvanta\nfrom kvanta.server.http import access\n")
    write(tmp_path, "python/kvanta/server/http/__init__.py", "")
    write(tmp_path, "python/kvanta/server/http/access.py", "from kvanta.text.words import one\n")
    return tmp_path


def test_layers_accepts_a_clean_tree(tree: Path) -> None:
    assert run("check_layers.py", tree)[0] == 0


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("src/base/text.cc", '#include "engine/loop.h"\n', "names no file"),
        ("src/base/text.cc", '#include "kvanta/engine.h"\n', "'base' includes kvanta/engine.h of the higher layer"),
        ("src/base/text.cc", '  #  include "kernels/x.h"\n', "higher layer 'kernels'"),
        ("src/engine/gpu.cc", "#include <cublasLt.h>\n", "CUDA header cublasLt.h"),
        ("src/engine/gpu.cc", '#include "../base/text.h"\n', "names no file"),
        ("src/engine/gpu.cc", "#include <kvanta/engine.h>\n", "project's own header"),
        ("include/kvanta/engine.h", '#include "base/text.h"\n', "public header includes the private base/text.h"),
        ("src/kernels/attention/cuda/rows.h", "  std::copy_n(from, 4, to);\n", "copies nothing in device code"),
        ("include/kvanta/extra.h", "", "has no layer"),
        ("src/utils/text.h", "", "has no layer"),
        ("python/kvanta/errors.py", "from kvanta.text.words import one\n", "imports kvanta.text.words of the higher"),
        ("python/kvanta/text/more.py", "def f():\n    import kvanta.server\n", "more.py:2: layer 'text' imports"),
        ("python/kvanta/server/http/more.py", "from kvanta.server import app\n", "imports kvanta.server of the higher"),
        ("python/kvanta/other/more.py", "", "has no layer"),
    ],
)
def test_layers_finds(tree: Path, path: str, text: str, message: str) -> None:
    write(tree, "src/kernels/x.h", "")
    write(tree, path, text)
    status, output = run("check_layers.py", tree)
    assert status == 1
    assert path in output
    assert message in output


def test_layers_finds_modules_that_import_each_other(tree: Path) -> None:
    write(tree, "python/kvanta/text/one.py", "from kvanta.text import two\n")
    write(tree, "python/kvanta/text/two.py", "def f():\n    from kvanta.text.one import g\n")
    status, output = run("check_layers.py", tree)
    assert status == 1
    assert "import each other: kvanta.text.one -> kvanta.text.two -> kvanta.text.one" in output


def test_layers_finds_a_layer_without_files(tree: Path) -> None:
    write(tree, "python/kvanta/LAYERS", "missing\n" + (tree / "python/kvanta/LAYERS").read_text())
    assert "python/kvanta/LAYERS: missing does not exist" in run("check_layers.py", tree)[1]


def test_layers_finds_a_missing_public_header(tree: Path) -> None:
    (tree / "include/kvanta/engine.h").unlink()
    status, output = run("check_layers.py", tree)
    assert status == 1
    assert "include/kvanta/engine.h does not exist" in output


@pytest.mark.parametrize(
    ("path", "lines", "status", "message"),
    [
        ("src/a.cc", 400, 0, "longest 400"),
        ("src/a.cc", 401, 1, "error: src/a.cc has 401 lines, the limit is 400"),
        ("bench/a.cc", 401, 1, "error: bench/a.cc"),
        ("tests/a.cc", 401, 0, "warning: tests/a.cc"),
        ("tests/a.cc", 801, 1, "error: tests/a.cc has 801 lines, the limit is 800"),
    ],
)
def test_sizes(tmp_path: Path, path: str, lines: int, status: int, message: str) -> None:
    write(tmp_path, path, "int x;\n" * lines)
    found, output = run("check_sizes.py", tmp_path)
    assert found == status
    assert message in output


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [(450, 0, "warning: src/a.cc"), (451, 1, "the limit is 450"), (400, 1, "remove it from EXCEPTIONS")],
)
def test_sizes_of_exceptions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: int,
    status: int,
    message: str,
) -> None:
    write(tmp_path, "src/a.cc", "int x;\n" * lines)
    monkeypatch.setattr(check_sizes, "EXCEPTIONS", {"src/a.cc": 450})
    monkeypatch.setattr(sys, "argv", ["check_sizes.py", str(tmp_path)])
    assert check_sizes.main() == status
    assert message in capsys.readouterr().out


def test_sizes_looks_at_scripts_without_a_suffix_but_not_at_data(tmp_path: Path) -> None:
    write(tmp_path, "scripts/long", "#!/bin/sh\n" + "true\n" * 900)
    assert run("check_sizes.py", tmp_path)[0] == 1
    write(tmp_path, "scripts/long", "true\n" * 900)
    assert run("check_sizes.py", tmp_path)[0] == 0


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A README with an empty block, and the result file that belongs there."""
    row = {"format": "int8", "bits_per_element": 8.25, "bytes_per_token": 12345.0, "tokens_in_1_gib": 86978}
    row |= {"equal_top_tokens": 0.99, "mean_kl": 0.0003}
    write(tmp_path, "docs/results/demo.json", json.dumps({"formats": [row]}))
    write(tmp_path, "README.md", "before\n<!-- results:demo -->\n<!-- /results -->\nafter\n")
    return tmp_path


def test_results_fill_a_block_and_notice_a_changed_figure(page: Path) -> None:
    assert run("render_results.py", "--check", page)[0] == 1
    assert run("render_results.py", page)[0] == 0
    assert run("render_results.py", "--check", page)[0] == 0
    text = (page / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 12,345 " in text
    (page / "README.md").write_text(text.replace("12,345", "12,346"))
    status, output = run("render_results.py", "--check", page)
    assert status == 1
    assert "README.md: out of date" in output


def test_results_that_are_kept_by_name(page: Path) -> None:
    row = dict.fromkeys(("bits_per_element", "bytes_per_token", "kl_mean", "kl_median", "kl_p99", "kl_max"), 1.5)
    row |= {"top1": 0.5, "ppl_ratio": 1.0, "saturated": 0}
    write(page, "docs/results/eval.json", json.dumps({"formats": {"int8": row, "int4": row}}))
    write(page, "docs/eval.md", "<!-- results:eval -->\n<!-- /results -->\n")
    assert run("render_results.py", page)[0] == 0
    text = (page / "docs/eval.md").read_text()
    assert text.index("| int8 ") < text.index("| int4 ")


def test_results_that_are_not_there_yet(page: Path) -> None:
    rows = [{"format": "int8", "avx2": {"decode": 0.5, "prefill": 0.25}}, {"format": "int4", "avx2": {"decode": 0.1}}]
    write(page, "docs/results/support.json", json.dumps({"rows": rows}))
    write(page, "docs/support.md", "<!-- results:support -->\n<!-- /results -->\n")
    assert run("render_results.py", page)[0] == 0
    table = [line for line in (page / "docs/support.md").read_text().splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0].split("|")] == ["", "cache", "avx2, decode", "avx2, prefill", ""]
    assert [cell.strip() for cell in table[2].split("|")] == ["", "int8", "50.00%", "25.00%", ""]
    assert [cell.strip() for cell in table[3].split("|")] == ["", "int4", "10.00%", "-", ""]


def test_results_refuse_a_block_without_a_file(page: Path) -> None:
    (page / "docs/results/demo.json").unlink()
    status, output = run("render_results.py", "--check", page)
    assert status == 1
    assert "docs/results/demo.json" in output


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """A tree without violations, and a list of retired names of every kind."""
    lines = ["[cache]", "PageStore PagePool public", "page_store.h page_pool.h", "told grammar_tokens", "most* max"]
    lines += ["Monitor::Offer Monitor::Enqueue", "~line queue  # also a cache line"]
    write(tmp_path, "tools/renamed_names.txt", "\n".join(lines))
    write(tmp_path, "tools/prose_crutches.txt", "# list\nleft behind\nbehind -> after\nthat (is|are) none -> not one\n")
    write(tmp_path, "src/cache/page_pool.h", "// Pages of one size. Of PageStore, nothing is left.\nint line = 0;\n")
    write(tmp_path, "python/kvanta/fleet/plan.py", '"""Plans."""\n\ntold = most = 1  # how much\n')
    write(tmp_path, "docs/adr/0022-names.md", "before\n<!-- names -->\n<!-- /names -->\nafter\n")
    assert run("check_names.py", "--write", tmp_path)[0] == 0
    return tmp_path


def test_names_accept_a_clean_tree_and_write_the_table(names: Path) -> None:
    assert run("check_names.py", names)[0] == 0
    text = (names / "docs/adr/0022-names.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| cache | **`PageStore`** | `PagePool` |" in text
    assert "| cache | `line` | `queue` |" in text


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("src/cache/a.cc", "\n\nPageStore store;\n", ":3: PageStore is called PagePool"),
        ("src/cache/a.cc", "int told = 0;\n", ":1: told is called grammar_tokens"),
        ("src/cache/a.cc", "constexpr int kMostRows = 2;\n", ":1: kMostRows is called max"),
        ("src/cache/a.cc", "monitor.Offer(tokens);\n", ":1: Offer is called Monitor::Enqueue"),
        ("src/cache/page_store.cc", "", "the file's name is page_pool.h"),
        ("python/kvanta/a.py", "PageStore = 1\n", ":1: PageStore is called PagePool"),
        ("src/cache/a.cc", "int x;  // Whether it is so.\n", ':1: comment begins with "Whether"'),
        ("src/cache/a.cc", "// Rows.\nint x;\n/* Of a\n * GPU. */\n", ':3: comment begins with "Of"'),
        ("src/cache/a.cc", "//\n// What it is.\n", ':2: comment begins with "What"'),
        ("python/kvanta/a.py", 'def f() -> None:\n    """Those that wait."""\n', ':2: comment begins with "Those"'),
        ("python/kvanta/a.py", "x = 1  # Where it is\n", ':1: comment begins with "Where"'),
        ("src/cache/a.cc", "// Rows\n// behind it.\n", ':1: "behind": write after:'),
        ("src/cache/a.cc", 'Fail("a page\\n Behind it");\n', ':1: "Behind": write after:'),
        ("src/cache/a.cc", 'auto text = R"(a\nURL that is none)";\n', ':2: "that is none": write not one:'),
        ("src/README.md", "# A\n\n```\nbehind\n```\nand behind it\n", ':6: "behind": write after:'),
        ("python/bindings/a.cc", "// Left behind. Behind it.\n", ':1: "Behind": write after:'),
        ("docs/adr/0022-names.md", "<!-- names -->\n<!-- /names -->\n", "run tools/check_names.py --write"),
    ],
)
def test_names_find(names: Path, path: str, text: str, message: str) -> None:
    write(names, path, text)
    status, output = run("check_names.py", names)
    assert status == 1
    assert path in output
    assert message in output


@pytest.mark.parametrize(
    "text",
    [
        'const char* text = "PageStore // Of it";\n',
        'const char* text = R"(told\n// What)";\n',
        "// Rows of a page.\n// Where they lie is in cell.h.\n",
        "int almost = 0, kMostly = 1, Told = 2;\n",
        "TEST_F(PoolTest, PageStore) {}\nTEST(PageStore, Offer) {}\n",
        "const int n = 1'000'000;  // Offered rows\n",
        "const auto behind = 1;  // left behind, and the flag --behindhand\n",
    ],
)
def test_names_leave_strings_continued_comments_and_other_words(names: Path, text: str) -> None:
    write(names, "src/cache/a.cc", text)
    status, output = run("check_names.py", names)
    assert status == 0, output


def test_names_need_a_reason_for_a_name_that_is_not_checked(names: Path) -> None:
    write(names, "tools/renamed_names.txt", "~line queue\n")
    status, output = run("check_names.py", names)
    assert status == 1
    assert "needs a reason" in output


def test_a_wheel_must_have_the_notices_of_what_it_holds() -> None:
    licenses = [f"kvanta-1.dist-info/licenses/{file.parent.name}/{file.name}" for file in LICENSES]
    files = [
        "kvanta.libs/libssl-703b3f76.so.3",
        "kvanta.libs/libnl-route-3-6a64fbc7.so.200.26.0",
        "kvanta/_core.abi3.so",
    ]
    assert check_wheel.check_notices([*files, *licenses]) == {"libssl", "libnl-route-3"}
    for missing in ("openssl", "libnl", "fmt"):
        rest = [name for name in licenses if not name.endswith(f"/{missing}.txt")]
        with pytest.raises(check_wheel.WheelError, match=f"lacks the notice licenses/{missing}.txt"):
            check_wheel.check_notices([*files, *rest])
    with pytest.raises(check_wheel.WheelError, match="the bundled library libz has no notice"):
        check_wheel.check_notices([*files, "kvanta.libs/libz-0123abcd.so.1", *licenses])


def test_every_notice_is_of_something_that_a_wheel_may_hold() -> None:
    assert {file.stem for file in LICENSES} == {*check_wheel.COMPILED_IN, *check_wheel.BUNDLED.values()}


def program(folder: Path, text: str) -> Path:
    file = folder / "program"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_a_linter_that_is_killed_has_not_found_files_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint, "CLANG_TIDY", str(program(tmp_path, "kill -9 $$")))
    assert "ended with -9 on src/base/quote.cc" in lint.lint(["src/base/quote.cc"], "c++ -Iinclude -o quote.o")
    monkeypatch.setattr(lint, "CLANG_TIDY", str(program(tmp_path, "exit 0")))
    assert not lint.lint(["src/base/quote.cc"], "c++ -Iinclude -o quote.o")


def test_a_matrix_is_not_written_of_no_tests(tmp_path: Path) -> None:
    text = """for word; do case $word in --gtest_output=json:*) file=${word#*:};; esac; done
echo '{"tests": 0, "testsuites": []}' >"$file" """
    status, output = run("support_matrix.py", program(tmp_path, text), "--json", tmp_path / "support.json")
    assert status == 1
    assert "has no test *AccuracyTest.*" in output
    assert not (tmp_path / "support.json").exists()


def test_fuzzers_have_a_time_limit_however_many_there_are(tmp_path: Path) -> None:
    script = tmp_path / "scripts/fuzz"
    write(tmp_path, "scripts/fuzz", (TOOLS.parent / "scripts" / "fuzz").read_text())
    for name in ("one", "two", "three"):
        write(tmp_path, f"tests/fuzz/{name}_fuzz.cc", "")
        target = tmp_path / f"build/asan/tests/fuzz/{name}_fuzz"
        target.parent.mkdir(parents=True, exist_ok=True)
        program(target.parent, 'echo "$@"').rename(target)
    done = subprocess.run(["bash", script, "2"], capture_output=True, text=True, check=True)
    assert done.stdout.count("-max_total_time=1 ") == 3, "of 0, libFuzzer makes no limit"
