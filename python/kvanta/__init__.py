"""Kvanta: LLM inference on a quantized KV cache.

from kvanta import LLM, SamplingParams
llm = LLM(model="smollm2", kv_cache_dtype="int4")
print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from kvanta import attention, formats
from kvanta._core import version as _version
from kvanta.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from kvanta.errors import InputError, KvantaError, QueueFullError, RankLostError, ResourceError
from kvanta.llm import LLM
from kvanta.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from kvanta.params.pooling_params import PoolingParams
from kvanta.params.repetition import RepetitionDetectionParams
from kvanta.params.sampling_params import SamplingParams
from kvanta.params.structured_outputs import StructuredOutputsParams

__version__ = _version()

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FlatLogprobs",
    "InputError",
    "KvantaError",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QueueFullError",
    "RankLostError",
    "RepetitionDetectionParams",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
    "attention",
    "formats",
]
