"""What a cache format does to a model: divergence from the exact cache, needles found, greedy text that is kept."""

from kvanta.evaluate.evaluation import TASKS, Evaluation, Settings, evaluate

__all__ = ["TASKS", "Evaluation", "Settings", "evaluate"]
