"""The suite lm-eval: tasks of lm-evaluation-harness on plait's models, as records."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.evals.groupings import Grouping, average, grouping
from plait.evals.quiet import quiet
from plait.evals.suites import LmEval, Outcome, Subject
from plait.fields import nearest
from plait.model.io import load
from plait.records import Record, provenance

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""the harness's own defaults"""
SAMPLE_TEXT = 2000
"""characters of an answer that a sample row keeps"""


@dataclasses.dataclass(frozen=True)
class Pass:
    """Tasks that run together, within the same limits."""

    loaded: Mapping[str, Any]
    """the harness's: tasks, groups, group_map"""
    grouping: Grouping | None = None

    @property
    def max_length(self) -> int | None:
        return None if self.grouping is None else self.grouping.max_length


def run_harness(options: LmEval, subjects: Sequence[Subject]) -> Iterator[Outcome]:
    _need_harness()
    from plait.evals.lm_eval import PlaitLM

    with quiet(), contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        passes = _passes(options)
    for subject in subjects:
        model = load(subject.path, backend=subject.backend, device=subject.device, dtype=subject.dtype)  # pyright: ignore[reportArgumentType]
        outcome, origin = Outcome(), _origin(subject, model)
        for each in passes:
            judged = PlaitLM(
                model,
                tokenizer=subject.path,
                batch_size=options.batch_size,
                max_length=options.max_length or each.max_length,
                cut="left" if each.grouping is None else each.grouping.cut,
            )
            results = _evaluate(judged, each, options)
            axes = {"suite": "lm-eval", "model": subject.name, "max_length": judged.max_length}
            if options.limit is not None:
                axes["limit"] = options.limit
            found = _records(results, each, axes, judged.cut_by_task)
            step = subject.step
            outcome.records += [dataclasses.replace(r, provenance=origin, step=step) for r in found]
            outcome.samples += [{"model": subject.name, "step": step} | row for row in _samples(results)]
            outcome.notes += _notes(each, judged)
        yield outcome


def _need_harness() -> None:
    try:
        import lm_eval.models.huggingface  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"suite lm-eval: it needs lm-evaluation-harness (no module {error.name}): pip install 'plait[eval]'"
        ) from None


# Tasks.


def _passes(options: LmEval) -> list[Pass]:
    """What is to be run; unknown tasks and data that is not to be had are errors before any model is loaded."""
    groupings = [grouping(name) for name in dict.fromkeys(options.group)]
    wanted = [*options.tasks, *(task for each in groupings for member in each.members for task in member.tasks)]
    manager = _manager(options.include_path, wanted)
    known = set(manager.all_tasks)
    for name in options.tasks:
        if name not in known:
            where = f" and {options.include_path}" if options.include_path else ""
            near = nearest(name, known) or f"{len(known)} are known; "
            raise ValueError(f"task = {name!r}; {near}it must be one of the harness's{where} (lm_eval ls tasks)")
    passes = [Pass(_load(manager, [(name, None) for name in options.tasks]))] if options.tasks else []
    for each in groupings:
        names = [(task, m.metric) for m in each.members for task in m.tasks if task in known]
        if not names:
            raise ValueError(f"group = {each.name!r}; the harness has none of its tasks")
        passes.append(Pass(_load(manager, names), each))
    return passes


def _manager(include_path: Path | None, wanted: Iterable[str]) -> Any:
    """The harness's index of tasks; the folder's alone where that has all, as the harness's own takes a while."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    if include_path is not None:
        local = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(wanted) <= set(local.all_tasks):
            return local
    return TaskManager(include_path=None if include_path is None else str(include_path))


def _load(manager: Any, names: Iterable[tuple[str, str | None]]) -> dict[str, Any]:
    """Tasks and groups with their data; a metric that is named is measured even where a task leaves it out."""
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name, metric in names:
        try:
            found = manager.load([name])
            tasks = found["tasks"].values()
            if metric == "acc_norm" and any("acc_norm" not in task.aggregation() for task in tasks):
                metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
                found = manager.load([{"group": f"plait {name}", "task": [{"task": name, "metric_list": metrics}]}])
                found = {"tasks": found["tasks"]}
        except ImportError as error:
            raise ValueError(f"task {name}: it needs a package that is not installed: {error.name}") from None
        except Exception as error:  # of datasets, the hub, the network, a task's own code
            raise ValueError(f"task {name}: {_why(error)}") from None
        for kind, entries in found.items():
            loaded[kind] |= entries
    return loaded


def _why(error: Exception) -> str:
    first = " ".join(str(error).split())[:300]
    what = f"{type(error).__name__}: {first}"
    home = type(error).__module__.partition(".")[0]
    if not isinstance(error, OSError) and home not in ("datasets", "huggingface_hub", "httpx", "httpx2", "requests"):
        return f"it cannot be loaded ({what})"
    return (
        f"its data cannot be had ({what}); offline, give --include-path a folder with"
        " NAME.yaml of `task: NAME`, `dataset_path: json`, `dataset_kwargs: {data_files: {test: /PATH/NAME.jsonl}}`,"
        " `test_split: test` and how to read a row"
    )


# Running.


def _evaluate(judged: Any, each: Pass, options: LmEval) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

    _settle(each, options.num_fewshot, options.allow_code)
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])  # noqa: NPY002 (the harness draws from it)
    torch.manual_seed(SEEDS["torch"])
    with quiet(), contextlib.redirect_stdout(sys.stderr):
        results = evaluate(
            judged,
            each.loaded,
            limit=options.limit,
            bootstrap_iters=1000,
            confirm_run_unsafe_code=options.allow_code,
        )
    assert results is not None, "one process"
    return results


def _settle(each: Pass, num_fewshot: int | None, allow_code: bool) -> None:
    """Settings of the tasks, as the harness's own command sets them."""
    if num_fewshot is None and each.grouping is not None:
        num_fewshot = each.grouping.num_fewshot
    new = None if each.grouping is None else each.grouping.max_new_tokens
    for name, task in each.loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not allow_code:
            raise ValueError(f"task {name}: it runs code that the model writes; allow that with --allow-code true")
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):  # 0 in a task's file is meant so
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])
        if new is not None and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value={"max_gen_toks": new}, update=True)


# Results.


def _records(results: Mapping[str, Any], each: Pass, axes: dict, cut: Mapping[str, int]) -> list[Record]:
    """A record for every task, group and filter, and one for the average."""
    if each.grouping is not None:
        axes = axes | {"group": each.grouping.name}
    above = {name: group for group, names in results.get("group_subtasks", {}).items() for name in names}
    found = []
    for task in _in_order(results):
        row = results["results"][task]
        by_filter: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            metric, _, name = key.partition(",")
            if name and isinstance(value, int | float):
                by_filter.setdefault(name, {})[metric] = float(value)
        for name, values in by_filter.items():
            place = axes | {"task": task, "num_fewshot": results["n-shot"].get(task)}
            if name != "none":
                place["filter"] = name
            if task in above:
                place["part_of"] = above[task]
            values["n"] = _count(results, task)
            if cut.get(task):
                values["cut"] = cut[task]
            found.append(Record(kind="eval", name="score", values=values, axes=place))
    if each.grouping is not None:
        mean = average(each.grouping, results["results"], _leaves(each.loaded["groups"]))
        label = "partial_average" if mean.missing else "average"
        values = {label: mean.value, f"{label}_stderr": mean.stderr, "n": len(mean.found), "missing": len(mean.missing)}
        found.append(Record(kind="eval", name="average", values=values, axes=axes))
    return found


def _in_order(results: Mapping[str, Any]) -> list[str]:
    """Groups, each before its parts, and tasks."""
    below = results.get("group_subtasks", {})
    inside = {name for names in below.values() for name in names}

    def walk(name: str) -> Iterator[str]:
        yield name
        for part in below.get(name, ()):
            yield from walk(part)

    names = [each for name in (*below, *results["results"]) if name not in inside for each in walk(name)]
    return [name for name in dict.fromkeys(names) if name in results["results"]]


def _count(results: Mapping[str, Any], task: str) -> int:
    counts = results["n-samples"]
    children = results.get("group_subtasks", {}).get(task, ())
    return sum(_count(results, child) for child in children) if children else counts.get(task, {}).get("effective", 0)


def _leaves(groups: Mapping[str, Any]) -> dict[str, list[str]]:
    """The tasks of each of the harness's groups, however deep."""
    return {name: [task.task_name for task in group.get_all_tasks()] for name, group in groups.items()}


def _samples(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, rows in results.get("samples", {}).items():
        for row in rows:
            yield {
                "task": task,
                "doc": row["doc_id"],
                "filter": row["filter"],
                "prompt": row["prompt_hash"],
                "target": _plain(row["target"]),
                "output": _plain(row["filtered_resps"]),
                "scores": {metric: _plain(row[metric]) for metric in row["metrics"]},
            }


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, str):
        return value[:SAMPLE_TEXT]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [_plain(each) for each in value]
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def _notes(each: Pass, judged: Any) -> list[str]:
    """What a reader of the numbers must know."""
    limit, known = judged.max_length, judged.model.spec.context_length
    side = "on the left" if judged.cut == "left" else "in the middle"
    notes = [f"{task}: {n} prompts cut {side} to max_length = {limit}" for task, n in judged.cut_by_task.items()]
    if known is not None and limit > known:
        notes.append(f"max_length = {limit} is beyond the model's context_length = {known}")
    if each.grouping is None:
        return notes
    there = {*each.loaded["tasks"], *each.loaded["groups"]}
    for member in each.grouping.members:
        if not there.issuperset(member.tasks):
            notes.append(
                f"{each.grouping.name}: {member.name} is missing: the harness has no {member.task}; give it by"
                f" --include-path, with the metric {member.metric}"
            )
    if each.grouping.unstated:
        notes.append(f"{each.grouping.name}: the paper leaves open {each.grouping.unstated}")
    return notes


def _origin(subject: Subject, model: Any) -> dict[str, Any]:
    device = torch.cuda.get_device_name(subject.device) if subject.device.startswith("cuda") else subject.device
    origin = provenance(spec_hash=model.spec.hash, device=device)
    versions = origin["versions"] | {"lm_eval": importlib.metadata.version("lm_eval")}
    return origin | {"versions": versions, "dtype": str(model.embed.weight.dtype).removeprefix("torch.")}
