"""plait's models under lm-evaluation-harness. Importing this module registers them there as `plait`:

    python -c 'import plait.evals.lm_eval; from lm_eval.__main__ import cli_evaluate; cli_evaluate()' \\
        --model plait --model_args pretrained=runs/NAME/checkpoints/step-00001000 --tasks arc_easy

Tokenization, chat templates and tasks are the harness's; forward passes, logits, the cache and generation are plait's.

Shapes: B rows, T tokens, D = d_model, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]
from transformers import PretrainedConfig

from plait.evals.groupings import Cut
from plait.evals.quiet import quiet
from plait.evals.tokenizer import harness_tokenizer
from plait.mixers import Backend
from plait.model.generate import stream
from plait.model.io import find_model, load
from plait.model.lm import LM
from plait.scoring import CHUNK
from plait.terminal import progress_bar

ROOM = {"cpu": 1 << 13, "cuda": 1 << 17}
"""tokens of a batch, padding included, that batch_size = auto begins with; halved where memory runs out"""
SAMPLING = ("temperature", "top_k", "top_p")
"""generation settings of tasks that plait has, beside do_sample"""
GREEDY = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
"""settings that say nothing at these values"""


@register_model("plait")
class PlaitLM(HFLM):
    """An LM as the harness's model.

    pretrained: a directory that plait.load takes, or an LM, which then needs `tokenizer`, a directory. max_length:
    tokens of prompt and answer; None: the spec's context_length. cut: where longer prompts of a generation lose tokens
    (before a continuation that is scored it is always on the left). batch_size: rows, or `auto`: as many as fit a
    number of tokens, fewer where memory runs out.
    """

    def __init__(
        self,
        pretrained: str | Path | LM,
        *,
        tokenizer: str | Path | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        backend: Backend = "torch",
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = 64,
        max_length: int | None = None,
        cut: Cut = "left",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ):
        if isinstance(pretrained, LM):
            if tokenizer is None:
                raise ValueError(
                    "tokenizer = None; with a model that is loaded already, give the tokenizer's directory"
                )
            model, where = pretrained, Path(tokenizer)
        else:
            where = find_model(pretrained)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            model = load(where, backend=backend, device=device, dtype=_dtype(dtype))
        model.eval()
        words, self.stop_tokens = harness_tokenizer(Path(tokenizer or where), model.spec.vocab_size)
        stand_in = SimpleNamespace(device=model.embed.weight.device, config=PretrainedConfig(), name_or_path=str(where))
        with quiet():  # it warns that this is no name of a model on the hub
            super().__init__(
                stand_in,
                backend="causal",
                tokenizer=words,
                batch_size=batch_size or "auto",
                max_batch_size=max_batch_size,
                max_length=_max_length(model, max_length),
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
            )
        self._model = model
        self.pretrained = str(where)
        self.cut: Cut = cut
        self.cut_by_task: Counter[str] = Counter()
        """prompts that were too long for max_length, by task"""
        self._room = ROOM.get(self.device.type, ROOM["cpu"])
        self._names: Sequence[str] = ()

    @property
    def eot_token_id(self) -> int:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            return min(self.stop_tokens, default=self.tokenizer.bos_token_id)
        return eos

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        bos = self.tokenizer.bos_token_id if self.custom_prefix_token_id is None else self.custom_prefix_token_id
        return self.eot_token_id if bos is None else bos

    def get_model_info(self) -> dict[str, Any]:
        spec = self.model.spec
        return {
            "model_num_parameters": self.model.num_params,
            "model_dtype": str(self.model.embed.weight.dtype),
            "model_revision": spec.hash,
            "model_sha": "",
        }

    # Log-likelihood.

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._names = [str(request.task_name) for request in requests]
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._names = ()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """For every (strings, context, continuation): the continuation's summed log-probability, and whether it is
        what greedy decoding gives. Requests that read the same tokens are one row."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"{self._name(i)}: a continuation of {len(continuation)} tokens; it must have 1 to max_length ="
                    f" {self.max_length}"
                )
            whole = [*(context or [self.prefix_token_id]), *continuation[:-1]]
            whole = self._cut(whole, self.max_length, self._name(i), "left")
            rows.setdefault(tuple(whole), []).append(i)
        tokens, members = list(rows), list(rows.values())
        done: dict[int, tuple[float, bool]] = {}

        def score(batch: list[int]) -> int:
            wanted = [(row, i) for row, k in enumerate(batch) for i in members[k]]
            found = self._score([tokens[k] for k in batch], [(row, requests[i][2]) for row, i in wanted])
            for (_, i), answer in zip(wanted, found, strict=True):
                done[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
            return len(wanted)

        self._in_batches(tokens, score, len(requests), "log-likelihood", show=not disable_tqdm)
        return [done[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(
        self, rows: Sequence[Sequence[int]], wanted: Sequence[tuple[int, list[int]]]
    ) -> list[tuple[float, bool]]:
        """wanted: (row, continuation), the row's tokens being those before each of the continuation's."""
        tokens_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, tokens in zip(tokens_BT, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        lengths = [len(continuation) for _, continuation in wanted]
        places = [range(len(rows[row]) - len(tokens), len(rows[row])) for row, tokens in wanted]
        row_N = torch.tensor([row for row, tokens in wanted for _ in tokens], device=self.device)
        place_N = torch.tensor([place for several in places for place in several], device=self.device)
        target_N = torch.tensor([token for _, tokens in wanted for token in tokens], device=self.device)
        x_BTD = self.model.hidden(tokens_BT.to(self.device))  # no mask: nothing that is read comes after padding
        sums, greedy = [], []
        x_ND, size = x_BTD[row_N, place_N], CHUNK
        for x, target in zip(x_ND.split(size), target_N.split(size), strict=True):
            logits = self.model.logits(x)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            sums.append(logits.log_softmax(-1).gather(-1, target[:, None])[:, 0])
            greedy.append(logits.argmax(-1) == target)
        pairs = zip(torch.cat(sums).split(lengths), torch.cat(greedy).split(lengths), strict=True)
        return [(float(values.sum()), bool(right.all())) for values, right in pairs]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of max_length tokens; each token is scored once."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            pieces = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(piece)) for piece in pieces]
            owners += [i] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Generation.

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first stop string; requests of the same settings go together."""
        by_settings: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(i)
        done: dict[int, str] = {}
        for indices in by_settings.values():
            settings = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
            until = handle_stop_sequences(settings.pop("until"), eos=self.tok_decode([self.eot_token_id], False))
            new = settings.pop("max_gen_toks")
            name = str(requests[indices[0]].task_name)
            sampling = _sampling(settings, name)
            if not 0 < new < self.max_length:
                raise ValueError(
                    f"{name}: it asks for {new} new tokens; they must be 1 to max_length - 1 = {self.max_length - 1}"
                )
            prompts = [self._prompt(requests[i], self.max_length - new) for i in indices]

            def complete(
                batch: list[int], prompts=prompts, indices=indices, new=new, until=until, sampling=sampling
            ) -> int:
                texts = self._complete([prompts[k] for k in batch], new, until, sampling)
                for k, text in zip(batch, texts, strict=True):
                    done[indices[k]] = text
                    self.cache_hook.add_partial("generate_until", requests[indices[k]].args, text)
                return len(batch)

            self._in_batches(prompts, complete, len(prompts), "generation", show=not disable_tqdm, extra=new)
        return [done[i] for i in range(len(requests))]

    def _prompt(self, request: Any, room: int) -> list[int]:
        tokens = self.tok_encode(request.args[0]) or [self.prefix_token_id]
        return self._cut(tokens, room, str(request.task_name), self.cut)

    def _complete(self, prompts: Sequence[list[int]], new: int, until: list[str], sampling: dict) -> list[str]:
        B, T = len(prompts), max(map(len, prompts))
        tokens_BT, mask_BT = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, T - len(prompt) :], mask_BT[row, T - len(prompt) :] = torch.tensor(prompt), True
        steps = stream(
            self.model,
            tokens_BT.to(self.device),
            mask=None if mask_BT.all() else mask_BT.to(self.device),
            max_new_tokens=new,
            beyond=True,  # max_length decides
            **sampling,
        )
        look_back = 1 + max((len(stop.encode()) for stop in until), default=0)
        out: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(B))
        for token_B in steps:
            for row, token in enumerate(token_B.tolist()):
                if row not in open_rows:
                    continue
                if token not in self.stop_tokens:
                    out[row].append(token)
                    tail = self.tok_decode(out[row][-look_back:])
                if token in self.stop_tokens or any(stop in tail for stop in until if stop):
                    open_rows.remove(row)
            if not open_rows:
                break
        return [postprocess_generated_text(self.tok_decode(tokens), until, None) for tokens in out]

    # Batches.

    def _in_batches(
        self,
        rows: Sequence[Sequence[int]],
        work: Callable[[list[int]], int],
        total: int,
        label: str,
        *,
        show: bool,
        extra: int = 0,
    ) -> None:
        """Call work(indices of rows) until all are done, the longest first: where memory is short, that shows at once.
        work says how many of the total it has done; extra: tokens that come to every row."""
        for row in rows:
            if not 0 <= min(row) <= max(row) < self.model.spec.vocab_size:
                size = self.model.spec.vocab_size
                raise ValueError(f"tokenizer: token {max(row)} has no place in the model's vocab_size = {size}")
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        done = 0
        with progress_bar(total, show=show, label=label) as step:
            while order:
                length = len(rows[order[0]]) + extra
                size = min(len(order), self._rows_at_once(length))
                try:
                    done += work(order[:size])
                except torch.OutOfMemoryError:
                    if self.batch_size != "auto" or size == 1:
                        raise
                    self._room = size // 2 * length
                    continue
                order = order[size:]
                step(done)

    def _rows_at_once(self, length: int) -> int:
        if self.batch_size != "auto":
            return int(self.batch_size)
        return max(1, min(self.max_batch_size or 64, self._room // length))

    def _name(self, i: int) -> str:
        return self._names[i] if self._names else "text"

    def _cut(self, tokens: list[int], room: int, name: str, where: Literal["left", "middle"]) -> list[int]:
        """At most `room` of the tokens; what is cut is counted."""
        if len(tokens) <= room:
            return tokens
        self.cut_by_task[name] += 1
        head = room // 2 if where == "middle" else 0
        return [*tokens[:head], *tokens[len(tokens) - (room - head) :]]


def _max_length(model: LM, given: int | None) -> int:
    length = given or model.spec.context_length
    if length is None:
        raise ValueError("max_length: the model's spec has no context_length; give --max-length, in tokens")
    if length < 2:
        raise ValueError(f"max_length = {length}; it must be at least 2")
    return length


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """As the harness's command line gives it; None and auto keep the file's."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = None if dtype == "auto" else getattr(torch, dtype, None)
    if dtype != "auto" and not isinstance(found, torch.dtype):
        raise ValueError(f"dtype = {dtype!r}; it must be auto, float32, bfloat16 or float16")
    return found


def _sampling(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A task's generation settings as arguments of `stream`."""
    settings = dict(settings)
    sample = settings.pop("do_sample", False)
    for key, value in settings.items():
        if key not in SAMPLING and not (key in GREEDY and GREEDY[key] == value):
            allowed = ", ".join(("do_sample", "until", "max_gen_toks", *SAMPLING))
            raise ValueError(f"{name}: generation_kwargs: {key} = {value!r}; plait has {allowed}")
    return {key: settings[key] for key in SAMPLING if settings.get(key) is not None} if sample else {}
