"""What the tests of LLM ask the shipped model."""

from kvanta import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPT = "Once upon a time"
