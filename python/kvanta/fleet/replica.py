"""One replica of the simulation: continuous batching with chunked prefill, as the engine's scheduler does it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvanta.fleet.cache import BlockCache
from kvanta.fleet.costs import ReplicaCosts
from kvanta.loadgen.workload import PlannedRequest

_OVERTAKING_S = 0.5
"""Time that others may take at once from the oldest prompt (src/scheduler/prompt_order.cc)."""
_ROW_UNIT = 8
"""Tokens that a step computes of its first prompt, whatever time is left."""


@dataclass
class SimulatedRequest:
    """A request on its way."""

    planned: PlannedRequest
    expected_tokens: int = 0
    """Prompt tokens that its replica did not hold when it was sent there."""
    cached_tokens: int = 0
    loaded_tokens: int = 0
    """Part of cached_tokens that came from the shared store."""
    computed: int = 0
    decoded: int = 0
    ready_s: float | None = None
    """Its pages have been loaded by then; None: not looked up."""
    first_token_s: float = math.inf
    finished_s: float = math.inf

    @property
    def depth(self) -> int:
        """Tokens in the cache."""
        return self.cached_tokens + self.computed + self.decoded

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of the prompt that are in the cache as a whole."""
        size = self.planned.block_tokens
        return self.planned.blocks[: (self.cached_tokens + self.computed) // size] if size else ()

    @property
    def tokens_to_compute(self) -> int:
        """Prompt tokens that are still to be computed."""
        return self.planned.input_tokens - self.cached_tokens - self.computed

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.planned.arrival_s


@dataclass
class _Step:
    """A step's requests, and its seconds."""

    decoding: list[SimulatedRequest]
    prefilling: list[tuple[SimulatedRequest, int]]
    """Requests whose prompts are computed, and the tokens of each in this step."""
    seconds: float


class SharedStore(BlockCache):
    """A store that all replicas write to and read from."""

    def __init__(self, capacity: int, bytes_per_token: float) -> None:
        super().__init__(capacity)
        self.bytes_per_token = bytes_per_token


@dataclass
class Replica:
    """Runs its requests step by step; `now_s` is the time up to which it has run."""

    costs: ReplicaCosts
    cache: BlockCache
    capacity_tokens: int
    store: SharedStore | None = None
    now_s: float = 0.0
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[SimulatedRequest] = field(default_factory=list)
    sent: int = 0
    """Requests that are on their way to it."""
    backlog_tokens: int = 0
    """expected_tokens of requests without a first token."""
    _overtaken_s: float = 0.0
    """What others had while the oldest prompt could have run, less what that had."""
    _expected: Counter[int] = field(default_factory=Counter)
    _running_tokens: int = 0
    _current: _Step | None = None

    @property
    def requests(self) -> int:
        """Requests that run, wait or are on their way."""
        return len(self.waiting) + len(self.running) + self.sent

    def expected(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are in the cache, or in a prompt that has no first token yet."""
        found = self.cache.match(blocks)
        while found < len(blocks) and (blocks[found] in self._expected or blocks[found] in self.cache):
            found += 1
        return found

    def missing(self, planned: PlannedRequest) -> int:
        """Prompt tokens of a request that are not expected to be in the cache."""
        return max(0, planned.input_tokens - self.expected(planned.blocks) * planned.block_tokens)

    def send(self, request: SimulatedRequest) -> None:
        """Counts a request that is on its way, and will be received."""
        request.expected_tokens = self.missing(request.planned)
        self.backlog_tokens += request.expected_tokens
        self._expected.update(request.planned.blocks)
        self.sent += 1

    def receive(self, request: SimulatedRequest) -> None:
        """Takes a request that was sent."""
        self.sent -= 1
        self.waiting.append(request)

    def enqueue(self, request: SimulatedRequest, time_s: float) -> None:
        """Takes a request that comes at `time_s`; steps until then have run."""
        if not self.requests:
            self.now_s = max(self.now_s, time_s)
        self.send(request)
        self.receive(request)

    def run_until(self, time_s: float) -> None:
        """Steps that begin before `time_s`."""
        while self.now_s < time_s and self.requests:
            self.run_step(time_s)

    def run_step(self, time_s: float) -> None:
        """A step, or the wait for pages; equal steps up to `time_s` at once."""
        self._admit()
        if self.running:
            self._step(time_s)
        else:
            self.now_s = self.ready_s  # all wait for their pages

    def _admit(self) -> None:
        """Starts waiting requests in order while a step has room; those whose pages are loaded let others pass."""
        for request in sorted(self.waiting, key=self._length) if self._by_time else list(self.waiting):
            if len(self.running) >= self.costs.max_num_seqs or self._room(request) <= 0:
                return
            needed = request.planned.input_tokens + request.planned.output_tokens
            if self.running and self._running_tokens + needed > self.capacity_tokens:
                return
            if request.ready_s is None:
                request.ready_s = self.now_s + self._look_up(request)
            if request.ready_s > self.now_s:
                continue
            self.waiting.remove(request)
            self.running.append(request)
            self._running_tokens += needed
            self._reserve()

    def _room(self, request: SimulatedRequest) -> int:
        """Tokens of a step that running sequences leave; a prompt that comes first has those of longer ones, too."""
        room = self.costs.max_num_batched_tokens
        for other in self.running:
            if not self._by_time or not other.tokens_to_compute or self._length(other) <= self._length(request):
                room -= max(1, other.tokens_to_compute)
        return room

    @property
    def _by_time(self) -> bool:
        return self.costs.max_step_s != 0

    def _length(self, request: SimulatedRequest) -> float:
        """Tokens that remain, less for each second of waiting: none after four times what the prompt takes alone.

        As PromptOrder::Length (src/scheduler/prompt_order.cc) has it.
        """
        max_delay = 4 * self.costs.prefill_s(request.planned.input_tokens - request.cached_tokens, 0)
        waited = self.now_s - request.planned.arrival_s
        return request.tokens_to_compute * (1 - waited / max_delay) if waited < max_delay else max_delay - waited

    def _in_order(self, prompts: list[SimulatedRequest], oldest: SimulatedRequest | None) -> list[SimulatedRequest]:
        """The order in which prompts share a step."""
        if not self._by_time:
            return prompts
        has_turn = self._overtaken_s >= _OVERTAKING_S
        return sorted(prompts, key=lambda each: (has_turn and each is not oldest, self._length(each)))

    def _look_up(self, request: SimulatedRequest) -> float:
        """Finds its cached tokens; the seconds until they are in memory."""
        seconds = 0.0
        planned = request.planned
        size = planned.block_tokens
        # The last token is always computed: it gives the first logits.
        limit = (planned.input_tokens - 1) // size if size else 0
        blocks = planned.blocks[:limit]
        found = self.cache.match(blocks)
        if self.store is not None:
            stored = self.store.match(blocks)
            loaded = max(0, stored - found) * size
            load_s = self.costs.load_s + loaded * self.store.bytes_per_token / self.costs.load_bytes_per_s
            # As the engine does: what is cheaper to compute is not loaded.
            if loaded and load_s < self.costs.prefill_s(loaded, found * size):
                seconds, found = load_s, stored
                request.loaded_tokens = loaded
        request.cached_tokens = found * size
        return seconds

    def _reserve(self) -> None:
        own = sum(request.depth - len(request.blocks) * request.planned.block_tokens for request in self.running)
        size = max((request.planned.block_tokens for request in self.running), default=0)
        self.cache.reserved = math.ceil(max(0, own) / size) if size else 0

    def _step(self, time_s: float) -> None:
        """One step, or as many equal ones as nothing happens in between."""
        step = self._form()
        costs, decoding = self.costs, step.decoding
        if step.prefilling:
            self._finish(step, self.now_s + step.seconds)
            return
        steps = min(request.planned.output_tokens - request.decoded for request in decoding)
        grown = costs.decode_depth_s * len(decoding)  # each step is longer than the one before
        wanted = math.ceil((time_s - self.now_s) / step.seconds) if step.seconds > 0 and time_s < math.inf else steps
        steps = max(1, min(steps, wanted))
        self.now_s += steps * step.seconds + grown * steps * (steps - 1) / 2
        self._decode(decoding, steps)

    def _form(self) -> _Step:
        """The next step of the running requests."""
        costs = self.costs
        decoding = [request for request in self.running if request.tokens_to_compute == 0]
        depth = float(sum(request.depth for request in decoding))
        seconds = costs.decode_s(len(decoding), depth) + (costs.step_s if decoding else 0.0)
        budget = costs.max_num_batched_tokens - len(decoding)
        prefilling: list[tuple[SimulatedRequest, int]] = []
        prefill_s = 0.0
        prompts = [request for request in self.running if request.tokens_to_compute > 0]
        waiting = len(prompts) + len(self.waiting)
        limit_s = costs.step_limit_s(seconds, bool(decoding), waiting)
        oldest = min(prompts, key=lambda request: request.planned.arrival_s, default=None)
        for request in self._in_order(prompts, oldest):
            tokens = min(budget, request.tokens_to_compute)
            if limit_s < math.inf:
                in_time = costs.prefill_tokens(limit_s - seconds - prefill_s, request.depth)
                tokens = min(tokens, in_time if prefilling else max(in_time, _ROW_UNIT))
            if tokens > 0:
                added = costs.prefill_s(tokens, request.depth)
                prefill_s += added
                prefilling.append((request, tokens))
                budget -= tokens
                self._overtaken_s += added if request is not oldest else -added
                if tokens == request.tokens_to_compute:  # its first token waits for the step
                    limit_s = min(limit_s, costs.step_limit_s(seconds, True, waiting))
        self._overtaken_s = min(max(0.0, self._overtaken_s), 2 * _OVERTAKING_S)
        # Weights are read once for all: few prompt tokens cost no less than a step.
        return _Step(decoding, prefilling, max(seconds + prefill_s, costs.step_s))

    def _finish(self, step: _Step, time_s: float) -> list[SimulatedRequest]:
        """The step ends at `time_s`; requests that have a token from it."""
        self.now_s = time_s
        done = []
        for request, tokens in step.prefilling:
            request.computed += tokens
            self.cache.add(request.blocks)
            if request.tokens_to_compute == 0:
                done.append(request)
        self._decode(step.decoding, 1)
        for request in done:
            self.backlog_tokens -= request.expected_tokens
            self._expected -= Counter(request.planned.blocks)
            if self.store is not None:
                self.store.add(request.blocks)
            request.first_token_s = time_s
            self._decode([request], 1)
        return step.decoding + done

    def begin_step(self, time_s: float) -> float | None:
        """Begins a step at `time_s`, which end_step ends. Its seconds on a dedicated CPU; None: no request can run."""
        self.now_s = time_s
        self._admit()
        self._current = self._form() if self.running else None
        return None if self._current is None else self._current.seconds

    def end_step(self, time_s: float) -> list[SimulatedRequest]:
        """Ends the step that has begun; the requests that have a token from it."""
        assert self._current is not None
        step, self._current = self._current, None
        return self._finish(step, time_s)

    @property
    def ready_s(self) -> float:
        """The earliest time at which pages of a waiting request are loaded."""
        return min((request.ready_s or 0.0 for request in self.waiting), default=math.inf)

    def _decode(self, requests: list[SimulatedRequest], steps: int) -> None:
        for request in requests:
            request.decoded += steps
            if request.decoded >= request.planned.output_tokens:
                request.finished_s = self.now_s
                self.running.remove(request)
                self._running_tokens -= request.planned.input_tokens + request.planned.output_tokens
                self._reserve()
                self._keep(request)

    def _keep(self, request: SimulatedRequest) -> None:
        """The rest of the prompt and the answer stay in the cache, too, as blocks that no other prompt has."""
        size = request.planned.block_tokens
        if size:
            own = request.depth // size - len(request.blocks)
            first = -1 - (request.planned.index << 32)
            self.cache.add((*request.blocks, *range(first, first - own, -1)))
