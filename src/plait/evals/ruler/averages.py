"""The papers' averages over RULER and BABILong, by name: which tasks at which lengths. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.evals.babilong import Babilong
from plait.evals.ruler import LISTS, NIAH, QA
from plait.fields import suggest

K = 1024
Entry = tuple[str, int]
"""task, length"""
ALL = (*NIAH, *LISTS, *QA)
"""the 13 tasks"""
SINGLE = ("niah_single_1", "niah_single_2", "niah_single_3")
MULTIKEY = ("niah_multikey_1", "niah_multikey_2")


@dataclass(frozen=True)
class LongGrouping:
    """The mean over columns of the mean over each column's entries."""

    name: str
    source: str
    columns: tuple[tuple[Entry, ...], ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for column in self.columns for entry in column)


@dataclass(frozen=True)
class LongAverage:
    name: str
    value: float | None
    """over what there is; the paper's only where nothing is missing or synthetic"""
    found: tuple[Entry, ...]
    missing: tuple[Entry, ...]
    synthetic: tuple[Entry, ...]
    """entries of `found` that are generated stand-ins (QA without the user's data, generated bAbI)"""

    @property
    def about(self) -> str:
        """What it is over, as '11 tasks + 2 synthetic; missing: cwe at 4096'."""
        tasks = len({task for task, _ in self.found} - {task for task, _ in self.synthetic})
        made = len({task for task, _ in self.synthetic})
        words = [f"{tasks} tasks"] * bool(tasks or not made) + [f"{made} synthetic"] * bool(made)
        return " + ".join(words) + (f"; missing: {name_entries(self.missing)}" if self.missing else "")


def name_entries(entries: Iterable[Entry]) -> str:
    lengths: dict[str, list[str]] = {}
    for task, length in entries:
        lengths.setdefault(task, []).append(str(length))
    return ", ".join(f"{task} at {', '.join(found)}" for task, found in lengths.items())


def _columns(tasks: Sequence[str], lengths: Sequence[int]) -> tuple[tuple[Entry, ...], ...]:
    return tuple(tuple((task, length) for task in tasks) for length in lengths)


def _within(columns: Iterable[tuple[Entry, ...]], least: int, most: int) -> tuple[tuple[Entry, ...], ...]:
    return tuple(column for column in columns if least <= column[0][1] <= most)


# 003, section 12, tables 16 to 19: no CWE; QA-1 from 2K, QA-2 from 4K. All 57 count the same.
_003 = tuple(
    ((task, length),)
    for length in (1 * K, 2 * K, 4 * K, 8 * K, 16 * K)
    for task in ALL
    if task != "cwe" and not (task == "qa_1" and length < 2 * K) and not (task == "qa_2" and length < 4 * K)
)
# 001, tables 7 to 15: a column a length, each of the same weight: within 4K, one of RULER and three of BABILong.
_RU = _columns(ALL, [4 * K, 8 * K, 16 * K, 32 * K, 64 * K])
_BA = _columns(Babilong.names, [0, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K])
# 004, section 5.1, tables 2 and 13.
_NATIVE, _EXTENDED = [16 * K, 32 * K], [64 * K, 128 * K, 256 * K]

LONG_GROUPINGS: Mapping[str, LongGrouping] = {
    name: LongGrouping(name, source, columns)
    for name, source, columns in (
        ("000/NIAH-8-16K", "000, appendix E, table 11", _columns(tuple(NIAH), [16 * K])),
        ("000/NIAH-8-32K", "000, appendix E, table 11", _columns(tuple(NIAH), [32 * K])),
        ("000/RULER-13-16K", "000, appendix E, table 11", _columns(ALL, [16 * K])),
        ("000/RULER-13-32K", "000, appendix E, table 11", _columns(ALL, [32 * K])),
        ("001/RULER", "001, appendix B, table 7", _RU),
        ("001/BABILong", "001, appendix B, table 7", _BA),
        ("001/within-4K", "001, appendix B, table 7", _within((*_RU, *_BA), 0, 4 * K)),
        ("001/beyond-4K", "001, appendix B, table 7", _within((*_RU, *_BA), 4 * K + 1, 64 * K)),
        ("001/all", "001, appendix B, table 7", (*_RU, *_BA)),
        ("003/RULER-57", "003, section 12, table 16", _003),
        ("004/Single-Native", "004, section 5.1, table 2", _columns(SINGLE, _NATIVE)),
        ("004/Single-Extended", "004, section 5.1, table 2", _columns(SINGLE, _EXTENDED)),
        ("004/Multi-Key-Native", "004, section 5.1, table 2", _columns(MULTIKEY, _NATIVE)),
        ("004/Multi-Key-Extended", "004, section 5.1, table 2", _columns(MULTIKEY, _EXTENDED)),
    )
}


def long_grouping(name: str) -> LongGrouping:
    """ValueError in a line where there is none of this name."""
    if name not in LONG_GROUPINGS:
        raise ValueError(f"group = {name!r}; {suggest(name, LONG_GROUPINGS)}")
    return LONG_GROUPINGS[name]


def long_average(grouping: LongGrouping, scores: Mapping[Entry, float]) -> LongAverage:
    """The mean over a grouping's entries, (task, length) -> score. qa_syn1 and qa_syn2 stand in for qa_1 and qa_2 where
    these are not there; the result says so."""
    found, missing, synthetic, means = [], [], [], []
    for column in grouping.columns:
        values = []
        for task, length in column:
            entry = (task, length) if (task, length) in scores else (QA.get(task, task), length)
            if entry not in scores:
                missing.append((task, length))
                continue
            values.append(scores[entry])
            found.append(entry)
            synthetic += [entry] * (entry[0] in (*QA.values(), *Babilong.names))
        if values:
            means.append(sum(values) / len(values))
    value = sum(means) / len(means) if means else None
    return LongAverage(grouping.name, value, tuple(found), tuple(missing), tuple(synthetic))


def long_averages(scores: Mapping[Entry, float]) -> list[LongAverage]:
    """Of every grouping of which there is anything."""
    found = (long_average(grouping, scores) for grouping in LONG_GROUPINGS.values())
    return [average for average in found if average.found]
