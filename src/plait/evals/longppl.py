"""The suite longppl: perplexity on the tokens that a reference model needs a long context for (Fang et al. 2025; 000,
appendix A; 003, "LongPPL reproduction").

Key tokens: loss_short - loss_full > gain and loss_full < most, of the reference, in nats; the short pass sees K to
K + d - 1 tokens. They are kept as stretches of characters, so that any tokenizer finds its own tokens in them.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from plait.data import IGNORE
from plait.evals.models import Judged, open_model, weights_digest
from plait.evals.ranks import Ranks
from plait.evals.results import Row
from plait.evals.settings import Rule
from plait.evals.stats import mean_of, ratio_of
from plait.evals.store import Store
from plait.evals.suites import LongPpl, Outcome, Subject
from plait.evals.texts import Span, Tokens, digest, documents, inside, merged, tokenize
from plait.files import read_json, write_json
from plait.model.io import find_model
from plait.model.lm import LM
from plait.records import Record
from plait.terminal import progress_bar
from plait.windows import AT_ONCE, short_losses


def run_longppl(options: LongPpl, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
    store = Store(out, Ranks.here())
    texts = list(documents(options.data, options.text_field, options.split, options.limit))
    reference = _reference(options, subjects[0])
    keys = stretches_of(options, texts, reference, store.ranks)
    drawn = digest(json.dumps(_identity(options, reference)))
    for subject in subjects:
        yield measure(open_model(subject), texts, keys, options, drawn, store)


def _reference(options: LongPpl, like: Subject) -> Subject:
    """With the device and dtype of another."""
    assert options.reference is not None
    return dataclasses.replace(
        like, name=options.reference, path=find_model(options.reference), opaque=options.reference_opaque
    )


def _identity(options: LongPpl, reference: Subject) -> list:
    """What of a reference and the options makes key tokens others."""
    return [weights_digest(reference.path), str(reference.dtype), options.rule.__dict__]


def stretches_of(options: LongPpl, texts: Sequence[str], reference: Subject, ranks: Ranks) -> list[list[Span]]:
    """The key stretches of every text: from the cache, or by the reference, which is loaded only then."""
    identity = _identity(options, reference)
    files = [_cache_file(options.cache, [*identity, text]) for text in texts]
    missing = [i for i in range(ranks.rank, len(files), ranks.world) if not files[i].exists()]
    if missing:
        judged = open_model(reference)
        label = f"key tokens of {reference.name}: documents"
        with progress_bar(len(missing), show=ranks.first, label=label) as step:
            for done, i in enumerate(missing, 1):
                found = key_stretches(judged, texts[i], options.rule, options.beyond)
                about = {"reference": reference.name, "rule": options.rule.__dict__, "text": digest(texts[i])}
                files[i].parent.mkdir(parents=True, exist_ok=True)
                write_json(files[i], {**about, "keys": found})
                step(done)
        del judged
        gc.collect()
    ranks.meet()
    return [[(start, end) for start, end in read_json(file)["keys"]] for file in files]


def _cache_file(cache: Path | None, key: list) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return (home / "plait" / "longppl" if cache is None else Path(cache)) / f"{name}.json"


def _read(judged: Judged, text: str, rule: Rule, beyond: bool) -> Tokens:
    tokens = tokenize(judged.tokenizer, text, special=rule.special, max_tokens=rule.max_tokens)
    judged.check_length(len(tokens.ids), beyond, "max_tokens")
    return tokens


def key_stretches(reference: Judged, text: str, rule: Rule, beyond: bool = False) -> list[Span]:
    """The characters of a text's key tokens, tokens that touch as one."""
    tokens = _read(reference, text, rule, beyond)
    if len(tokens.ids) < 2:
        return []
    ids = torch.tensor([tokens.ids], device=reference.device)
    at_once = AT_ONCE if isinstance(reference.model, LM) else 1  # others may have no logits but all of them
    short_T = short_losses(reference.model, ids[:, :-1], ids[:, 1:], K=rule.K, d=rule.d, at_once=at_once)[0]
    wanted = ids[:, 1:].where(~short_T.isnan(), IGNORE)
    if not bool((wanted != IGNORE).any()):
        return []
    full_T = reference.losses(ids[:, :-1], wanted)[0]
    key_T = (short_T - full_T > rule.gain) & (full_T < rule.most)  # NaN is neither
    return merged(tokens.spans[i + 1] for i in key_T.nonzero()[:, 0].tolist())


def key_losses(judged: Judged, text: str, keys: Sequence[Span], rule: Rule, beyond: bool = False) -> list[float]:
    """Losses of a model's own tokens within the stretches; of a first token, which nothing precedes, there is none."""
    tokens = _read(judged, text, rule, beyond)
    found = [i for i in inside(tokens.spans, keys) if i > 0]
    if not found:
        return []
    ids, targets = torch.tensor([tokens.ids[: found[-1]]]), torch.full((1, found[-1]), IGNORE)
    for i in found:
        targets[0, i - 1] = tokens.ids[i]
    losses_T = judged.losses(ids, targets)[0]
    return losses_T[~losses_T.isnan()].double().tolist()


def measure(
    judged: Judged,
    texts: Sequence[str],
    keys: Sequence[Sequence[Span]],
    options: LongPpl,
    drawn: str,
    store: Store,
) -> Outcome:
    about = {"model": judged.name, "step": judged.step, "run": judged.identity, "suite": "longppl", "drawn": drawn}
    rows = [about | {"task": "text", "index": i, "prompt": digest(text)} for i, text in enumerate(texts)]
    new = [i for i in range(store.ranks.rank, len(texts), store.ranks.world) if rows[i] not in store]
    with progress_bar(len(new), show=store.ranks.first, label=f"{judged.name}: documents") as step:
        for done, i in enumerate(new, 1):
            losses = key_losses(judged, texts[i], keys[i], options.rule, options.beyond)
            store.add([rows[i] | {"loss": sum(losses), "tokens": len(losses)}])
            step(done)
    store.gather()
    return _outcome(judged, store.whole(rows), options, store) if store.ranks.first else Outcome()


def _outcome(judged: Judged, rows: Sequence[Row], options: LongPpl, store: Store) -> Outcome:
    setting, least = options.published, max(1, options.published.min_keys)
    kept = [row for row in rows if row["tokens"] >= least]
    counts = {"keys": sum(row["tokens"] for row in kept), "documents": len(kept), "dropped": len(rows) - len(kept)}
    values = counts | averages([row["loss"] for row in kept], [row["tokens"] for row in kept])
    axes = {"suite": "longppl", "model": judged.name, "reference": options.reference, "K": options.rule.K}
    axes |= {"d": options.rule.d, "max_tokens": options.rule.max_tokens, "min_keys": least}
    few = f"{judged.name}: {len(rows) - len(kept)} of {len(rows)} documents have fewer than {least} key tokens"
    notes = [few] if len(kept) < len(rows) else []
    if options.setting:
        axes |= {"setting": options.setting, "headline": setting.headline}
        notes += [f"setting {options.setting}: the paper leaves open {setting.unstated}"] if setting.unstated else []
    record = Record(kind="eval", name="longppl", step=judged.step, values=values, axes=axes, provenance=judged.origin)
    return Outcome(records=[record], samples=store.loose(rows), notes=notes)


def averages(sums: Sequence[float], counts: Sequence[int]) -> dict[str, float | None]:
    """Of documents' losses and key tokens. pooled: exp of the mean loss over all keys. per_document: the mean over
    documents of exp of each one's mean."""
    if not sums:
        return dict.fromkeys(("pooled", "per_document", "loss"))
    pooled, each = ratio_of(sums, counts), mean_of([math.exp(a / n) for a, n in zip(sums, counts, strict=True)])
    values: dict[str, float | None] = {"pooled": math.exp(pooled.value), "per_document": each.value}
    if pooled.low is not None and pooled.high is not None:
        values |= {"pooled_low": math.exp(pooled.low), "pooled_high": math.exp(pooled.high)}
        values |= {"per_document_low": each.low, "per_document_high": each.high}
    return values | {"loss": pooled.value}
