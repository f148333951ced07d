"""PlaitForCausalLM: an LM with the interface of transformers' causal language models.

Shapes: B rows, T tokens, N = B * T, D = d_model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from plait.data import IGNORE
from plait.hf.cache import PlaitCache
from plait.hf.config import PlaitConfig
from plait.model.lm import LM

CACHE = "cache" if "cache" in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
"""transformers' name of the cache among inputs and outputs; both names are taken"""
LOSS_ELEMENTS = 1 << 26
"""fp32 logits that exist at a time while the loss is computed"""
MODES = ("greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation")
"""of generation, those that run here"""


class PlaitForCausalLM(PreTrainedModel, GenerationMixin):
    """`lm` is the plait.LM inside. Both have the same children, so parameters have plait's names, and what replaces a
    module of one (an adapter) replaces it in the other."""

    config: PlaitConfig
    config_class = PlaitConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # num_items_in_batch
    _input_embed_layer = "embed"
    _no_split_modules = ["Block"]  # noqa: RUF012
    lm: LM

    def __init__(self, config: PlaitConfig, lm: LM | None = None):
        super().__init__(config)
        device = torch.empty(0).device  # meta while from_pretrained builds an empty model
        if lm is None:
            dtype = torch.get_default_dtype()
            lm = LM(config.to_spec(), seed=_seed(), backend=config.backend, device=device, dtype=dtype)
        self.__dict__["lm"], self.__dict__["_modules"] = lm, lm._modules
        if lm.lm_head is None:
            self.lm_head = None
        self.gradient_checkpointing = False
        if device.type != "meta":
            for parameter in self.parameters():
                parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        self.post_init()

    @classmethod
    def from_lm(cls, lm: LM) -> PlaitForCausalLM:
        """The same model with this interface; the modules are shared."""
        return cls(PlaitConfig(spec=lm.spec.to_json(), backend=lm.backend), lm)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fresh values for the parameters that a checkpoint did not have."""
        missing = {n: p for n, p in self.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
        if missing:
            fresh = dict(LM(self.lm.spec, seed=_seed()).named_parameters())
            for name, parameter in missing.items():
                parameter.copy_(fresh[name])

    # The forward pass.

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: PlaitCache | None = None,
        cache: PlaitCache | None = None,
        inputs_embeds: None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, T, V] (of the last `logits_to_keep` tokens, or of the places it lists), loss and cache.

        attention_mask: [B, T], true on real tokens, padding anywhere; with a cache [B, past + T]. Logits of padding
        are zero. labels: [B, T], the tokens themselves, -100 where there is no loss; neither padding nor what follows
        it has one. use_cache: make a cache where none is given; None: as the config says, except in training and
        where there are labels.
        """
        if inputs_embeds is not None:
            raise ValueError("inputs_embeds: plait's models read token ids; give input_ids")
        if output_attentions or output_hidden_states:
            raise ValueError(
                "output_attentions, output_hidden_states: not kept; plait.capture reads them from model.lm"
            )
        if input_ids is None or input_ids.ndim != 2:
            raise ValueError("input_ids: they must be given, of shape [rows, tokens]")
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("logits_to_keep: with labels it must be 0; the loss needs all logits")
        held = check_cache(cache if past_key_values is None else past_key_values)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        if use_cache and held is None:
            held = self.new_cache(*input_ids.shape)
        mask = _new_columns(attention_mask, input_ids, held)
        if held is not None:
            held.make_room(input_ids.shape[1])
        x_BTD = self.lm.hidden(input_ids, mask=mask, cache=None if held is None else held.cache)
        if held is not None:
            held.advance(input_ids.shape[1], mask)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm.logits(x_BTD[:, kept])
        loss = None if labels is None else _loss(logits, labels, mask, num_items_in_batch)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: held})  # pyright: ignore[reportArgumentType]
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def new_cache(self, batch: int, max_length: int) -> PlaitCache:
        """An empty cache for `batch` rows, with room for max_length tokens to begin with."""
        return PlaitCache(self.lm.new_cache(batch, max_length))

    # Generation.

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: PlaitCache | None = None,
        cache: PlaitCache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of the next forward pass. After the prompt all tokens are real, and no mask is passed: a model
        with a mask waits for the device to know how many tokens there are."""
        if position_ids is not None:
            raise ValueError("position_ids: they follow from attention_mask, which tells real tokens from padding")
        held = cache if past_key_values is None else past_key_values
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
            if held is not None and held.columns and not is_first_iteration:
                attention_mask = None
        if attention_mask is not None and attention_mask.device != self.device:
            attention_mask = attention_mask.to(self.device)
        inputs = {"input_ids": input_ids.to(self.device), "attention_mask": attention_mask, CACHE: held}
        return inputs | kwargs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """The cache that was handed in, with room for what is to come, or a new one."""
        if generation_config.cache_implementation is not None:
            kind = generation_config.cache_implementation
            raise ValueError(f"cache_implementation = {kind!r}; plait's models have a cache of their own: leave it out")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            raise ValueError("attention_mask: a prompt ends in padding, or is nothing else; pad on the left")
        if generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant:
            self._check_rollback(max_cache_length)
        held = check_cache(model_kwargs.get(CACHE))
        if held is not None:
            held.reserve(max_cache_length)
            held._is_user_defined = True  # pyright: ignore[reportAttributeAccessIssue] (transformers then undoes an extra step)
        elif generation_config.use_cache:
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs[CACHE] = self.new_cache(rows, max_cache_length)

    def _check_rollback(self, length: int) -> None:
        for i, block in enumerate(self.lm.blocks):
            state = block.mixer.new_state(1, length, dtype=torch.float32, device=torch.device("meta"))
            why = state.why_not_crop(0, length)
            if why is not None:
                raise ValueError(f"generate: assisted decoding takes rejected tokens back; layers.{i}: {why}")

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs) -> None:
        if generation_mode not in MODES:
            raise ValueError(f"generate: mode {generation_mode.value}; it must be one of {', '.join(MODES)}")
        check = super()._validate_generation_mode  # pyright: ignore[reportAttributeAccessIssue]
        check(generation_mode, generation_config, generation_mode_kwargs)

    # Files, embeddings, training.

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in transformers, and spec.json beside it, so that plait.load reads the directory."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            directory = Path(save_directory)
            self.lm.spec.save(directory / "spec.json")
            whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
            if whole.exists() and index.exists():  # what was there before would hide what was written now
                min(whole, index, key=lambda path: path.stat().st_mtime_ns).unlink()

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"resize_token_embeddings: {new_num_tokens} tokens; the spec's vocab_size is {self.config.vocab_size},"
                " and a model's spec does not change"
            )
        return self.embed  # pyright: ignore[reportReturnType]

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, every_n_layers: int = 1
    ) -> None:
        self.gradient_checkpointing = enable
        self.lm.recompute = gradient_checkpointing_func if enable else None
        self.lm.recompute_every = every_n_layers


def check_cache(cache: Any) -> PlaitCache | None:
    if cache is not None and not isinstance(cache, PlaitCache):
        raise ValueError(
            f"{CACHE}: a {type(cache).__name__}; it must be a PlaitCache, which new_cache makes and forward returns"
        )
    return cache


def _seed() -> int:
    """From torch's global generator, as transformers draws fresh weights."""
    return int(torch.randint(1 << 31, (), device="cpu"))


def _new_columns(mask: Tensor | None, input_ids: Tensor, cache: PlaitCache | None) -> Tensor | None:
    """The part of an attention mask that is about the new tokens."""
    if mask is None:
        return None
    (B, T), past = input_ids.shape, 0 if cache is None else cache.columns
    if tuple(mask.shape) != (B, past + T):
        before = f", {past} of them in the cache" if past else ""
        raise ValueError(
            f"attention_mask: shape {tuple(mask.shape)}; it must be {(B, past + T)}, rows and tokens{before}"
        )
    if cache is not None and past:
        cache.check_past(mask[:, :past])
    return mask[:, past:]


def _loss(logits_BTV: Tensor, labels_BT: Tensor, mask_BT: Tensor | None, num_items: int | Tensor | None) -> Tensor:
    """Cross-entropy of the next tokens, in pieces whose fp32 logits are made anew for the backward pass: the mean, or
    the sum over num_items."""
    labels_BT = labels_BT.to(logits_BTV.device)
    if mask_BT is not None:
        real = mask_BT.to(logits_BTV.device).bool()
        before = F.pad(real[:, :-1], (1, 0))
        labels_BT = labels_BT.masked_fill(~(real & before), IGNORE)
    target_N = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE).flatten()
    size = max(1, LOSS_ELEMENTS // logits_BTV.shape[-1])
    total = logits_BTV.new_zeros((), dtype=torch.promote_types(logits_BTV.dtype, torch.float32))
    for logits_NV, target in zip(logits_BTV.flatten(0, 1).split(size), target_N.split(size), strict=True):
        total = total + checkpoint(_sum_of_losses, logits_NV, target, use_reentrant=False)
    count = (target_N != IGNORE).sum() if num_items is None else num_items
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _sum_of_losses(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(logits_NV, target_N, ignore_index=IGNORE, reduction="sum")
