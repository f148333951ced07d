"""PlaitConfig: a Spec in the clothes of a transformers config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from plait.mixers import Backend
from plait.spec import Spec


class PlaitConfig(PreTrainedConfig):
    """`spec` says everything about the model; sizes that tools ask for are read from it, and so cannot be set."""

    model_type = "plait"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    spec: dict[str, Any] | None = None
    """Spec.to_json()"""
    backend: Backend = "torch"
    """of the mixers; where a model runs, not what it is, so it is not saved"""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        if self.spec is None:
            raise ValueError("config: spec is missing; give what Spec.to_json() returns")
        self.to_spec()  # errors now, not when a model is built
        super().__post_init__(**kwargs)

    def to_spec(self) -> Spec:
        return Spec.from_json(self.spec, "config: spec")

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key != "backend"}

    @property
    def vocab_size(self) -> int:
        return self.to_spec().vocab_size

    @property
    def hidden_size(self) -> int:
        return self.to_spec().d_model

    @property
    def num_hidden_layers(self) -> int:
        return self.to_spec().num_layers

    @property
    def tie_word_embeddings(self) -> bool:
        return self.to_spec().tie_embeddings

    @property
    def max_position_embeddings(self) -> int:
        """The length it was trained on; absent where that is not known, as tools then take a default of their own."""
        length = self.to_spec().context_length
        if length is None:
            raise AttributeError("max_position_embeddings: the spec has no context_length")
        return length
