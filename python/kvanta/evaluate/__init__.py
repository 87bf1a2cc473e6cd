"""Effect of a cache format on a model: divergence from the exact cache, needles found, greedy text preserved."""

from kvanta.evaluate.evaluation import TASKS, Evaluation, Settings, evaluate

__all__ = ["TASKS", "Evaluation", "Settings", "evaluate"]
