"""Number of replicas by load: requests, and the part of the caches' memory that they hold.

Ray Serve pickles this module by value for its controller, which calls the policy and applies delays and limits.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

CACHE_OCCUPANCY = "cache_occupancy"
"""Share of a replica's cache that running requests hold; EngineReplica reports it."""
DEFAULT_TARGET_OCCUPANCY = 0.8


class ByRequestsAndCache:
    """A policy of autoscaling_config: the replicas that either load needs, whichever are more.

    Long contexts fill caches with few requests; short ones never do.
    """

    def __init__(self, target_cache_occupancy: float = DEFAULT_TARGET_OCCUPANCY) -> None:
        self._target = target_cache_occupancy

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Replicas, which Serve rounds up, and no state."""
        config: Any = context.config
        occupancy = (context.aggregated_metrics or {}).get(CACHE_OCCUPANCY, {})
        by_requests = context.total_num_requests / config.get_target_ongoing_requests()
        return max(by_requests, sum(occupancy.values()) / self._target), {}
