"""All that a training run was asked for: the options of `plait train`, kept flat in the run's config.json. No torch."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from plait import extend
from plait.config import family, leaves, suggest
from plait.config_json import from_json
from plait.files import read_json
from plait.presets import preset
from plait.spec import Spec
from plait.syntax import NAMES
from plait.train.config import TrainConfig
from plait.train.schedule import updates

if TYPE_CHECKING:
    from plait.data import Task

TASKS = ("spaced-retrieval", "mqar")
IN_TOKENS = {"tokens": "steps", "warmup_tokens": "warmup", "decay_tokens": "decay"}
"""what may be told in tokens instead of updates"""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The shape of a model: a layout and sizes, or a preset, which has its own. Sizes not given become those of SIZES.

    Args:
        layout: what each layer does, as 'gdn nope' or '3*swa[window=128] full'
        preset: a model by name instead, as small/8M/GDN-NoPE-LH, with the vocabulary of the data
        d_model: width of the residual stream
        num_layers: layers; the layout repeats until it fills them
        num_heads: query heads of every mixer that does not say otherwise
        num_kv_heads: KV heads of softmax attention (default: num_heads)
        head_dim: size of a query and key head (default: d_model / num_heads)
        d_ff: width of the MLPs (default: 8/3 d_model in steps of 64; 0: no MLPs)
        rope_theta: base of RoPE's frequencies
        tie_embeddings: one matrix for embedding and head
    """

    layout: str | None = None
    preset: str | None = None
    d_model: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    rope_theta: float | None = None
    tie_embeddings: bool | None = None

    SIZES: ClassVar[dict[str, Any]] = {
        "d_model": 128,
        "num_layers": 4,
        "num_heads": 2,
        "rope_theta": 10_000.0,
        "tie_embeddings": True,
    }

    def __post_init__(self):
        given = [name for name, value in vars(self).items() if value is not None and name != "preset"]
        if self.preset is not None and given:
            raise ValueError(
                f"preset = {self.preset}, {given[0]} = {getattr(self, given[0])}; a preset has its own layout and sizes"
            )
        if self.preset is None and self.layout is None:
            raise ValueError("layout, preset: neither is given; give a layout, as 'gdn nope', or --preset NAME")
        for name, value in self.SIZES.items() if self.preset is None else ():
            if name not in given:
                object.__setattr__(self, name, value)

    def spec(self, vocab_size: int | None, context_length: int | None = None) -> Spec:
        """vocab_size None: the one of the preset."""
        if self.preset is not None:
            spec = preset(self.preset)
            size = spec.vocab_size if vocab_size is None else vocab_size
            return dataclasses.replace(spec, vocab_size=size, context_length=context_length)
        assert vocab_size is not None, "a layout has no vocabulary of its own"
        values = dataclasses.asdict(self)
        del values["preset"]
        if self.d_ff is None:
            values["d_ff"] = max(64, round(values["d_model"] * 8 / 3 / 64) * 64)
        return Spec.from_layout(**values, vocab_size=vocab_size, context_length=context_length)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to train on: a synthetic task, text, or a mixture of texts.

    Args:
        task: synthetic task: spaced-retrieval, or mqar (associative recall)
        data: text file, or folder of them, read as bytes; or what `plait data build` made
        mixture: what plait data build made, PATH[@MIN_TOKENS][=WEIGHT] each, as books@32768=1,web=1: rows by weight, of
            documents with at least so many tokens
        document_masks: documents of one row do not see each other (token shards)
        gaps: spaces between a key and its repetition (spaced-retrieval), as 16,192
        gap_weights: share of examples with each gap (default: equal), as 0.5,0.5
        pairs: keys and values in a row (mqar), as 4,16,64; rows have 4 tokens for each, at least 64
        mqar_vocab: tokens that there are (mqar), half of them keys
        length: bytes or tokens of a training window (text)
        batch_size: examples or windows an update
    """

    task: str | None = None
    data: Path | None = None
    mixture: tuple[str, ...] = ()
    document_masks: bool = False
    gaps: tuple[int, ...] = (16, 192)
    gap_weights: tuple[float, ...] | None = None
    pairs: tuple[int, ...] = (4, 16, 64)
    mqar_vocab: int = 8192
    length: int = 256
    batch_size: int = 32

    def __post_init__(self):
        given = [name for name in ("task", "data", "mixture") if getattr(self, name)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            wanted = "--task spaced-retrieval, --data FILE_OR_DIR or --mixture DIR=WEIGHT,..."
            raise ValueError(f"task, data, mixture: {found}; give {wanted}")
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"task = {self.task!r}; {suggest(self.task, TASKS)}")
        _ = self.sources

    @property
    def sources(self) -> tuple[tuple[Path, int, float], ...]:
        """Of a mixture: (directory, fewest tokens of a document, weight)."""
        found = []
        for text in self.mixture:
            match = re.fullmatch(r"(?P<path>[^=@]+)(@(?P<least>\d+))?(=(?P<weight>[\d.]+))?", text)
            try:
                assert match is not None
                found.append((Path(match["path"]), int(match["least"] or 1), float(match["weight"] or 1)))
            except (AssertionError, ValueError):
                raise ValueError(f"mixture: {text!r}; write PATH[@MIN_TOKENS][=WEIGHT], as books@32768=1") from None
        return tuple(found)

    @property
    def shards(self) -> tuple[Path, ...]:
        """Directories of token shards."""
        if self.data is not None and (self.data / "data.json").exists():
            return (self.data,)
        return tuple(path for path, _, _ in self.sources)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's directory, of token shards that have one."""
        return next((path / "tokenizer" for path in self.shards if (path / "tokenizer").is_dir()), None)

    def updates(self, field: str, tokens: float) -> int:
        """Updates that see so many tokens; field: what was told in tokens."""
        if self.task is not None:
            raise ValueError(f"{field} = {tokens:g}; rows of {self.task} differ in length: give {IN_TOKENS[field]}")
        if not 0 < tokens < math.inf:
            raise ValueError(f"{field} = {tokens:g}; it must be above 0")
        return updates(tokens, self.batch_size * self.length)

    def build(self, seed: int) -> Task:
        from plait.data.mqar import MQAR
        from plait.data.packed import Packed, Part
        from plait.data.spaced_retrieval import SpacedRetrieval
        from plait.data.text import ByteText

        if self.shards:
            sources = self.sources or ((self.shards[0], 1, 1.0),)
            return Packed(
                parts=tuple(Part(path=path, min_tokens=least, weight=weight) for path, least, weight in sources),
                length=self.length,
                batch_size=self.batch_size,
                seed=seed,
                document_masks=self.document_masks,
            )
        if self.document_masks:
            raise ValueError("document_masks = true; only what plait data build made has documents to mask")
        if self.data is not None:
            return ByteText(path=self.data, length=self.length, batch_size=self.batch_size, seed=seed)
        if self.task == "mqar":
            return MQAR(vocab_size=self.mqar_vocab, pairs=self.pairs, batch_size=self.batch_size, seed=seed)
        return SpacedRetrieval(gaps=self.gaps, gap_weights=self.gap_weights, batch_size=self.batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """What plait.extend changes in the model before it is trained; its context_length follows the data's length.

    Args:
        extend_theta: another RoPE base for all that has RoPE, as 500000, or for families of layers, as full=500000:
            what has no RoPE stays without
        extend_window: wider windows, their RoPE base by 001's rule
        drop_rope: full attention without positions
    """

    extend_theta: tuple[str, ...] = ()
    extend_window: int | None = None
    drop_rope: bool = False

    def __post_init__(self):
        _ = self.thetas

    @property
    def thetas(self) -> tuple[tuple[str, float], ...]:
        """(family, base); family "": all."""
        found = []
        for text in self.extend_theta:
            name, _, base = text.rpartition("=")
            try:
                found.append((name, float(base)))
            except ValueError:
                raise ValueError(f"extend_theta: {text!r}; write a base, or FAMILY=BASE, as full=500000") from None
            if name and name not in NAMES:
                raise ValueError(f"extend_theta: {text!r}; {suggest(name, NAMES)}")
        return tuple(found)

    def apply(self, spec: Spec) -> Spec:
        if self.extend_window is not None:
            spec = extend.window(spec, self.extend_window)
        for name, base in self.thetas:
            mixers = (leaf for layer in spec.layers for leaf in leaves(layer.mixer))
            if not name or any(family(leaf) == name and leaf.rope_theta is not None for leaf in mixers):
                spec = extend.rope_theta(spec, base, families=[name] if name else None)
        return extend.drop_rope(spec) if self.drop_rope else spec


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    model: ModelOptions | None
    """None: that of `init`"""
    data: DataOptions
    train: TrainConfig
    extend: ExtendOptions = ExtendOptions()
    branch: str | None = None
    """RUN@STEP or checkpoint directory it started from, with its optimizer, its updates and its data"""
    init: str | None = None
    """RUN[@STEP], or any model that plait.load takes, whose weights it started from; all else is new"""

    def __post_init__(self):
        if self.branch is not None and self.init is not None:
            raise ValueError(f"branch = {self.branch}, init = {self.init}; a run starts from one of them")
        if self.model is None and self.init is None:
            ModelOptions()  # says what is missing
        if self.train.probe_every and self.data.task != "spaced-retrieval":
            found = f"probe_every = {self.train.probe_every}"
            raise ValueError(f"{found}; layer retrieval scores need --task spaced-retrieval")
        if self.train.compile and self.data.document_masks:
            raise ValueError("compile, document_masks: both are true; documents would compile anew in every update")

    def to_json(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for part in (self.model, self.data, self.train, self.extend):
            flat |= {} if part is None else dataclasses.asdict(part)
        flat |= {"branch": self.branch, "init": self.init}
        return {key: _plain(value) for key, value in flat.items()}

    @staticmethod
    def from_json(data: dict[str, Any], where: str = "settings") -> RunSettings:
        """From a flat mapping of option names, as in config.json or on the command line, with those of IN_TOKENS."""
        data = dict(data)
        budgets = {name: value for name in IN_TOKENS if (value := data.pop(name, None)) is not None}
        parts: dict[str, Any] = {name: data.pop(name, None) for name in ("branch", "init")}
        for name, cls in PARTS.items():
            if cls is TrainConfig:
                data |= {IN_TOKENS[field]: parts["data"].updates(field, value) for field, value in budgets.items()}
            own = {f.name for f in dataclasses.fields(cls)} & data.keys()
            values = {key: data.pop(key) for key in own}
            inherited = cls is ModelOptions and parts["init"] and all(value is None for value in values.values())
            parts[name] = None if inherited else from_json(cls, values, where)
        if data:
            raise ValueError(f"{where}: unknown field {next(iter(data))!r}")
        return RunSettings(**parts)

    @staticmethod
    def load(run: Path) -> RunSettings:
        return RunSettings.from_json(read_json(run / "config.json"), str(run / "config.json"))


PARTS = {"model": ModelOptions, "data": DataOptions, "train": TrainConfig, "extend": ExtendOptions}


def defaults() -> dict[str, Any]:
    """Every option as config.json has it where nobody asked for anything, and where it is older than the option."""
    return {f.name: _plain(f.default) for cls in PARTS.values() for f in dataclasses.fields(cls)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
