"""Parameters of embeddings: the fields of vLLM's PoolingParams, and the pooling type, which vLLM has per model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from kvanta import _core
from kvanta.errors import InputError
from kvanta.params.checks import one_line, truth, whole_number
from kvanta.params.fields import (
    INT32_MAX,
    Parameters,
    check_output_kind,
    check_side,
    check_truncation,
    optional,
    parameter,
    unsupported,
    without_effect,
)

POOLING_TYPES = {"mean": _core.PoolingType.MEAN, "last": _core.PoolingType.LAST}
_NO_HEAD = "models have no classification head"
_REFUSED_TYPES = {
    "cls": "the first token's state depends on that token alone, because attention is causal",
    "all": "give mean or last: states of single tokens are not returned",
    "step": "give mean or last: states of single tokens are not returned",
}


def check_pooling_type(name: str, value: Any) -> str:
    """The name in lower case. Raises InputError, with the reason for a type of vLLM that is not supported."""
    kind = value.lower() if isinstance(value, str) else ""
    if kind in POOLING_TYPES:
        return kind
    reason = f": {_REFUSED_TYPES[kind]}" if kind in _REFUSED_TYPES else ""
    raise InputError(f"{name} must be one of {', '.join(POOLING_TYPES)}, got {one_line(value)}{reason}")


@dataclass(kw_only=True)
class PoolingParams(Parameters):
    """None: the model's default, which `pooler_config` or its sentence-transformers files give.

    Raises InputError, naming the field and its range, when a value is out of range or not supported.
    """

    pooling_type: str | None = parameter(None, optional(check_pooling_type))
    """"mean": of the hidden states of all tokens; "last": the last token's. By default "last"."""
    normalize: bool | None = parameter(None, optional(truth))
    """Scales embeddings to an L2 norm of 1. Default: True."""
    use_activation: bool | None = parameter(None, optional(truth))
    """The same under vLLM's newer name."""
    dimensions: int | None = parameter(
        None, optional(lambda name, value: whole_number(name, value, 1, INT32_MAX, " or None"))
    )
    """First channels that are kept, before they are normalized; for models trained so (Matryoshka)."""
    truncate_prompt_tokens: int | None = parameter(None, optional(check_truncation))
    """Keeps this many tokens of a longer prompt; -1: as many as the context holds."""
    truncation_side: str | None = parameter(None, optional(check_side))
    """The side that is cut off: "left" (None), or "right"."""

    skip_reading_prefix_cache: bool | None = parameter(None, optional(truth))
    """Computes the whole prompt, as "mean" does in any case."""

    activation: Any = unsupported(None, use=_NO_HEAD)
    extra_kwargs: Any = unsupported(None, {}, use="there are no extensions that read them")
    output_kind: Any = without_effect(2, check_output_kind, "an embedding is returned at once", http=False)
    requires_token_ids: Any = unsupported(False, use="the tokens are always known")
    returned_token_ids: Any = unsupported(None, use=_NO_HEAD)
    softmax: Any = unsupported(None, use=_NO_HEAD)
    step_tag_id: Any = unsupported(None, use=_NO_HEAD)
    task: Any = unsupported(None, "embed", use="there are embeddings alone")

    fewest_new_tokens: ClassVar[int] = 0
    reserved_tokens: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Checks fields that depend on each other, too."""
        super().__post_init__()
        if self.use_activation is not None:
            if self.normalize not in (None, self.use_activation):
                message = f"normalize and use_activation are the same, got {self.normalize} and another"
                raise InputError(message, "normalize")
            self.normalize, self.use_activation = self.use_activation, None

    def with_defaults(self, defaults: PoolingParams) -> PoolingParams:
        """These parameters with those of `defaults` in place of None."""
        given = {
            field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name)) is not None
        }
        return dataclasses.replace(defaults, **given)

    def engine_params(self) -> _core.PoolingParams:
        """Parameters of the engine."""
        pooling = _core.PoolingParams()
        pooling.pooling_type = POOLING_TYPES[self.pooling_type or "last"]
        pooling.normalize = self.normalize is not False
        pooling.dimensions = self.dimensions or 0
        return pooling
