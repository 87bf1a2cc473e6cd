"""Prompts and results of the shipped model, for tests of LLM."""

from kvanta import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPT = "Once upon a time"
