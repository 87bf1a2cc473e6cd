"""The server's page and the Grafana dashboard: whole, self-contained, and of existing metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvanta import LLM

PAGE = Path(str(resources.files("kvanta"))) / "server" / "page"
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "kvanta.json"
SCRIPTS = sorted(path.name for path in PAGE.glob("*.js"))
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Markup(HTMLParser):
    """Elements, with a complaint about each that is not closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.complaints: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.complaints += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.complaints.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            self.texts.append(data)

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.elements if attribute in attrs]


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup((PAGE / "index.html").read_text(encoding="utf-8"))


def test_the_markup_is_whole(markup: Markup) -> None:
    assert markup.complaints == []
    ids = markup.values("id")
    assert len(ids) == len(set(ids))
    assert set(markup.values("for")) | set(markup.values("aria-labelledby")) <= set(ids)


def test_a_strict_content_security_policy_would_not_break_it(markup: Markup) -> None:
    """script-src 'self', style-src 'self': nothing inline."""
    assert not [text for text in markup.texts if text.strip()]
    names = {name for _, attrs in markup.elements for name in attrs}
    assert not [name for name in names if name.startswith("on") or name == "style"]
    for name in SCRIPTS:
        script = (PAGE / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.style\b", script
        )


def test_its_files_exist_and_all_are_used(markup: Markup) -> None:
    named = {
        value.removeprefix("page/") for value in (*markup.values("src"), *markup.values("href")) if "page/" in value
    }
    for name in SCRIPTS:
        named |= set(re.findall(r'from "\./([^"]+)"', (PAGE / name).read_text(encoding="utf-8")))
    assert named | {"index.html"} == {path.name for path in PAGE.iterdir() if path.is_file()}


def test_nothing_comes_from_outside() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""["'(=]\s*(https?:)?//|@import|url\(""", text), path.name


def test_every_element_that_a_script_asks_for_is_there(markup: Markup) -> None:
    asked = {name for script in SCRIPTS for name in re.findall(r'\$\("([\w-]+)"\)', (PAGE / script).read_text())}
    assert asked
    assert asked <= set(markup.values("id"))


def test_fields_have_labels(markup: Markup) -> None:
    """By a label around them, one that names them, or an aria-label."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    around = {
        match
        for label in re.findall(r"<label.*?</label>", text, re.DOTALL)
        for match in re.findall(r'id="(\w+)"', label)
    }
    fields = [attrs["id"] for tag, attrs in markup.elements if tag in ("input", "select", "textarea")]
    assert fields
    assert set(fields) <= around | set(markup.values("for"))


def run_script(folder: Path, script: str) -> None:
    """Runs `script` as a module next to the page's."""
    node = shutil.which("node")
    assert node, "the package nodejs is missing (scripts/apt-packages.txt)"
    for name in SCRIPTS:
        shutil.copy(PAGE / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "test.js").write_text('import assert from "node:assert/strict";\n' + script)
    for words in [["--check", name] for name in SCRIPTS] + [["test.js"]]:
        done = subprocess.run([node, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_the_scripts_read_metrics_and_streams(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        r"""
import { budget, gainedQuantile, parseMetrics, readings } from "./metrics.js";
import { EventReader, errorMessage } from "./stream.js";
import { ago, linePaths, niceCeiling, show } from "./chart.js";
import { figures } from "./chat.js";

const text = (tokens, hits, fast, slow) => `# HELP kvanta:generation_tokens_total New tokens.
kvanta:generation_tokens_total{model_name="a"} ${tokens}
kvanta:num_requests_running{model_name="a"} 3
kvanta:prefix_cache_queries_total{model_name="a"} ${2 * hits}
kvanta:prefix_cache_hits_total{model_name="a"} ${hits}
kvanta:kv_cache_used_bytes{format="int4",model_name="a"} 2097152
kvanta:kv_cache_used_bytes{format="exact",model_name="a"} 1048576
kvanta:kv_cache_budget_bytes{model_name="a"} 8388608
kvanta:sampled_kl_divergence_nats_sum{model_name="a"} 1
kvanta:sampled_kl_divergence_nats_count{model_name="a"} 4
kvanta:time_to_first_token_seconds_bucket{le="0.1",model_name="a"} ${fast}
kvanta:time_to_first_token_seconds_bucket{le="0.5",model_name="a"} ${fast + slow}
kvanta:time_to_first_token_seconds_bucket{le="+Inf",model_name="a"} ${fast + slow}
kvanta:inter_token_latency_max_seconds{model_name="a"} ${slow / 10}
damaged{ 7
kvanta:odd{name="a \\"b\\\\ }"} 5 1700000000
kvanta:none NaN
`;
const tiers = (bytes, hits) => text(0, 0, 0, 0) + `
kvanta:prompt_tokens_total{model_name="a"} ${100 * hits}
kvanta:prompt_tokens_cached_total{model_name="a"} ${70 * hits}
kvanta:disk_cache_hits_total{model_name="a"} ${20 * hits}
kvanta:disk_cache_limit_bytes{model_name="a"} 1073741824
kvanta:disk_cache_used_bytes{model_name="a"} ${3 * bytes}
kvanta:disk_cache_own_bytes{model_name="a"} ${bytes}
kvanta:disk_cache_read_bytes_total{model_name="a"} ${bytes}
kvanta:disk_cache_damaged_files_total{model_name="a"} 2
`;
const disk = readings(parseMetrics(tiers(0, 0)), parseMetrics(tiers(2097152, 2)), 2, "int4");
assert.deepEqual(disk.tiers, { memory: 50, disk: 20, computed: 30 });
assert.deepEqual(disk.disk, { int4: 2, others: 4 });
assert.deepEqual(disk.traffic, { "disk: read": 1, "disk: written": null });
assert.deepEqual(disk.faults, { "disk: errors": 0, "disk: damaged": 2, "disk: not written": 0 });
const store = (bytes, hits) => `
kvanta:store_cache_hits_total{model_name="a"} ${10 * hits}
kvanta:store_cache_written_bytes_total{model_name="a"} ${bytes}
kvanta:store_cache_read_errors_total{model_name="a"} 1
kvanta:store_cache_write_errors_total{model_name="a"} 2
`;
const both = (bytes, hits) => parseMetrics(tiers(bytes, hits) + store(bytes, hits));
const shared = readings(both(0, 0), both(2097152, 2), 2, "int4");
assert.deepEqual(shared.tiers, { memory: 40, disk: 20, store: 10, computed: 30 });
assert.deepEqual(shared.traffic, { "disk: read": 1, "disk: written": null, "store: read": null, "store: written": 1 });
assert.equal(shared.faults["store: errors"], 3);
const ram = (bytes, hits) => `
kvanta:host_cache_hits_total{model_name="a"} ${15 * hits}
kvanta:host_cache_read_bytes_total{model_name="a"} ${4 * bytes}
kvanta:host_cache_dropped_total{model_name="a"} 7
`;
const all = (bytes, hits) => parseMetrics(tiers(bytes, hits) + store(bytes, hits) + ram(bytes, hits));
const three = readings(all(0, 0), all(2097152, 2), 2, "int4");
assert.deepEqual(three.tiers, { memory: 25, host: 15, disk: 20, store: 10, computed: 30 });
assert.equal(three.traffic["host: read"], 4);
assert.deepEqual(Object.keys(three.faults).slice(0, 2), ["host: errors", "host: not written"]);
assert.equal(three.faults["host: not written"], 7);
const alone = (hits) => parseMetrics(text(0, 0, 0, 0) + store(0, hits) + `
kvanta:prompt_tokens_total{model_name="a"} ${30 * hits}
kvanta:prompt_tokens_cached_total{model_name="a"} ${20 * hits}
`);
const remote = readings(alone(0), alone(2), 2, "int4");
assert.deepEqual(remote.tiers, { memory: 10, store: 10, computed: 10 });
assert.deepEqual(remote.disk, { int4: null, others: null });
const [before, now] = [parseMetrics(text(100, 10, 0, 0)), parseMetrics(text(160, 40, 5, 10))];
assert.deepEqual(now.get("kvanta:odd"), [{ labels: { name: 'a "b\\ }' }, value: 5 }]);
assert.ok(!now.has("kvanta:none"));
const shown = readings(before, now, 2);
assert.equal(shown.throughput.answers, 30);
assert.equal(shown.throughput.prompts, null); // which this server does not tell
assert.equal(shown.requests.running, 3);
for (const chart of ["tiers", "disk", "traffic", "faults"]) { // without disk and store
  assert.ok(Object.values(shown[chart]).every((value) => value === null), chart);
}
assert.equal(shown.prefix.hit, 50);
assert.deepEqual(shown.cache, { int4: 2, exact: 1 });
assert.ok(Math.abs(shown.first.median - 200) < 1e-6); // 7.5 of 15: a quarter of the way from 0.1 to 0.5
assert.deepEqual(shown.next, { median: null, "99 %": null, "largest, lately": 1000 });
assert.deepEqual(shown.divergence, { lately: null, "so far": 0.25 });
assert.equal(budget(now), 8);
assert.equal(budget(new Map()), null);
assert.equal(readings(now, before, 2).throughput.answers, 0); // the server has been started again
assert.equal(gainedQuantile(now, now, "kvanta:time_to_first_token_seconds", 0.5), null);
assert.equal(readings(parseMetrics(""), parseMetrics("<html>"), 1).prefix.hit, null);

const whole = 'data: {"a": 1}\r\n\r\n: note\n\ndata: [DONE]\n\n';
for (let step = 1; step < 9; step++) {
  const reader = new EventReader();
  const got = [];
  for (let at = 0; at < whole.length; at += step) got.push(...reader.feed(whole.slice(at, at + step)));
  assert.deepEqual(got, ['{"a": 1}', "[DONE]"]);
}
assert.equal(errorMessage(400, '{"error": {"message": "no"}}'), "no");
assert.equal(errorMessage(502, "<html>"), "<html>");
assert.match(errorMessage(503, ""), /503/);
assert.deepEqual([0, 0.3, 1, 99, 100, 101].map(niceCeiling), [1, 0.5, 1, 100, 100, 200]);
const values = [null, 0, 0.05415, 12.34, 3005.4];
assert.deepEqual(values.map((value) => show(value, "")), ["–", "0", "0.0542", "12.3", "3,005"]);
assert.equal(show(5, "ms"), "5 ms");
assert.deepEqual([58, 298].map(ago), ["−58 s", "−4.97 min"]);
assert.deepEqual(linePaths([null, "1 2", null]), { lines: "M1 2", dots: "M1 2h0" }); // a point alone can be seen
assert.deepEqual(linePaths(["1 2", "3 4", null, "5 6"]), { lines: "M1 2L3 4M5 6", dots: "M5 6h0" });
const usage = { completion_tokens: 11, prompt_tokens: 9, prompt_tokens_details: { cached_tokens: 4 } };
const said = "11 tokens · 5.0 per second · first after 500 ms · 4 of 9 prompt tokens from the cache";
assert.equal(figures(usage, 0, 500, 2500), said);
assert.equal(figures(null, 0, null, 1), "");
""",
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the samples of /metrics; of a counter also while nothing was counted."""
    metrics = pytest.importorskip("kvanta.server.jobs.metrics")
    folder = str(tmp_path_factory.mktemp("pages"))
    store = "redis://127.0.0.1:1"  # needs no server: nothing is asked of it
    llm = LLM(
        "stories260k",
        kv_cache_dtype="int8",
        kv_cache_memory_bytes="8MiB",
        threads=1,
        kv_cache_dir=folder,
        kv_store=store,
    )

    def stats() -> dict[str, Any]:
        """With the tier that only a GPU has."""
        counts = llm.stats()
        return {**counts, "host": {**counts["host"], "enabled": True}}

    families = list(metrics.Metrics("m", stats).collect())
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    return counters | {sample.name for family in families for sample in family.samples}


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"kvanta:\w+", text))


def expressions(panel: dict[str, Any]) -> Iterator[str]:
    for target in panel["targets"]:
        yield target["expr"]


def test_every_metric_of_the_page_exists(served: set[str]) -> None:
    script = (PAGE / "metrics.js").read_text(encoding="utf-8")
    histograms = set(re.findall(r'milliseconds\("(\w+)"', script))
    means = set(re.findall(r'gainedMean\([^"]*"(kvanta:\w+)"', script))
    named = metrics_in(script) | {f"kvanta:{name}" for name in re.findall(r'gainedAs\("(\w+)"', script)}
    named |= {f"kvanta:{name}_bucket" for name in histograms}
    named |= {f"{name}_{part}" for name in means for part in ("sum", "count")}
    assert (len(histograms), len(means)) == (2, 1)
    assert named - means <= served


def test_every_metric_of_the_dashboard_exists(served: set[str]) -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert [each for panel in board["panels"] for each in expressions(panel)]
    for panel in board["panels"]:
        for expression in expressions(panel):
            assert metrics_in(expression), expression
            assert metrics_in(expression) <= served, panel["title"]
            assert expression.count("(") == expression.count(")")
            assert expression.count("{") == expression.count("}")
    for variable in board["templating"]["list"]:
        assert metrics_in(str(variable.get("definition", ""))) <= served


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
