"""One page of metrics for all models: those of each process under its model's name, and the states of all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator

import h11
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvanta.server.models.forward import get
from kvanta.server.models.pool import STATES, Model, ModelPool

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MODEL = "model_name"


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(pages: dict[str, str]) -> Iterator[Metric]:
    """Metrics of several servers: a family of each name, with the samples of all. `pages`: model -> its text."""
    families: dict[str, Metric] = {}
    for model, page in pages.items():
        for family in text_string_to_metric_families(page):
            target = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                target.samples.append(sample._replace(labels={**sample.labels, _MODEL: model}))
    yield from families.values()


def state_families(pool: ModelPool, responses: Counter[int]) -> Iterator[Metric]:
    """Metrics of the models' states. `responses`: numbers of answers by status, errors of this server included."""
    states = GaugeMetricFamily("kvanta:model_state", "1 for the state that the model is in.", labels=[_MODEL, "state"])
    memory = GaugeMetricFamily(
        "kvanta:model_memory_bytes", "Weights and cache of the model; 0: not in memory.", labels=[_MODEL]
    )
    waiting = GaugeMetricFamily("kvanta:model_waiting_requests", "Requests that wait for the model.", labels=[_MODEL])
    loads = CounterMetricFamily("kvanta:model_loads", "Loads of the model.", labels=[_MODEL])
    failures = CounterMetricFamily("kvanta:model_failures", "Failed loads and lost processes.", labels=[_MODEL])
    for model in pool.models.values():
        for state in STATES:
            states.add_metric([model.name, state], float(model.state == state))
        memory.add_metric([model.name], model.memory)
        waiting.add_metric([model.name], model.waiting)
        loads.add_metric([model.name], model.loads)
        failures.add_metric([model.name], model.failures)
    yield from (states, memory, waiting, loads, failures)
    yield GaugeMetricFamily("kvanta:memory_budget_bytes", "Memory that all models may take.", value=pool.budget)
    answers = CounterMetricFamily("kvanta:answers", "Answers of the server, by status.", labels=["status"])
    for status, count in sorted(responses.items()):
        answers.add_metric([str(status)], count)
    yield answers


async def metrics_page(pool: ModelPool, responses: Counter[int]) -> bytes:
    """The whole page. A process that does not answer is left out."""

    async def page(model: Model) -> tuple[str, str]:
        try:
            assert model.process is not None
            status, body = await get(model.process.socket, "/metrics")
        except (OSError, h11.RemoteProtocolError):
            return model.name, ""
        return model.name, body.decode() if status == 200 else ""

    asked = [page(model) for model in pool.models.values() if model.process is not None]
    pages = dict(await asyncio.gather(*asked))
    states = list(state_families(pool, responses))

    def page_of_all() -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*merged(pages), *states]))
        return generate_latest(registry)

    return await asyncio.to_thread(page_of_all)
