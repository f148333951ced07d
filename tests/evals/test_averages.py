"""The papers' averages over RULER and BABILong: from their own numbers comes their own average."""

from __future__ import annotations

import pytest

from plait.evals.babilong import Babilong
from plait.evals.ruler import LISTS, NIAH, QA
from plait.evals.ruler.averages import ALL, LONG_GROUPINGS, K, long_average, long_averages, long_grouping

# 000, table 11, Full at S4
TABLE_11 = [81.00, 93.50, 27.50, 30.00, 18.00, 1.50, 15.25, 20.88, 1.50, 4.90, 12.67, 14.00, 5.50]
# 001, table 7, RoPE at 1B: RULER at 4K to 64K, BABILong at 0 to 64K
RULER = dict(zip((4, 8, 16, 32, 64), (37.3, 1.5, 0.0, 0.0, 0.0), strict=True))
BABILONG = dict(zip((0, 2, 4, 8, 16, 32, 64), (47.4, 41.7, 28.8, 1.7, 0.3, 0.2, 0.1), strict=True))
# 003, table 16, 180M vanilla: the mean at each length
TABLE_16 = dict(zip((1, 2, 4, 8, 16), (8.60, 2.91, 1.50, 1.08, 1.08), strict=True))
# 004, table 13, HydraHead: 16K to 256K
SINGLE, MULTIKEY = (98.60, 98.33, 94.60, 89.00, 78.87), (41.40, 32.80, 32.30, 26.60, 23.20)


def scores_001() -> dict:
    scores = {(task, k * K): value for k, value in RULER.items() for task in ALL}
    return scores | {(task, k * K): value for k, value in BABILONG.items() for task in Babilong.names}


def scores_004() -> dict:
    lengths = [k * K for k in (16, 32, 64, 128, 256)]
    scores = {(f"niah_single_{i}", n): v for i in (1, 2, 3) for n, v in zip(lengths, SINGLE, strict=True)}
    return scores | {(f"niah_multikey_{i}", n): v for i in (1, 2) for n, v in zip(lengths, MULTIKEY, strict=True)}


PRINTED = [
    ("000/NIAH-8-16K", {(task, 16 * K): v for task, v in zip(ALL, TABLE_11, strict=True)}, 35.95),
    ("000/RULER-13-16K", {(task, 16 * K): v for task, v in zip(ALL, TABLE_11, strict=True)}, 25.09),
    ("001/RULER", scores_001(), 7.8),
    ("001/BABILong", scores_001(), 17.2),
    ("001/within-4K", scores_001(), 38.8),
    ("001/beyond-4K", scores_001(), 0.5),
    ("001/all", scores_001(), 13.3),
    ("003/RULER-57", {(task, k * K): v for k, v in TABLE_16.items() for task in ALL}, 2.84),
    ("004/Single-Native", scores_004(), 98.47),
    ("004/Single-Extended", scores_004(), 87.49),
    ("004/Multi-Key-Native", scores_004(), 37.10),
    ("004/Multi-Key-Extended", scores_004(), 27.37),
]


@pytest.mark.parametrize(("name", "scores", "printed"), PRINTED, ids=[name for name, *_ in PRINTED])
def test_the_papers_numbers_give_the_papers_average(name, scores, printed):
    found = long_average(long_grouping(name), scores)
    assert found.value == pytest.approx(printed, abs=0.051 if name.startswith("001") else 0.0051)
    assert found.missing == ()


def test_003s_entries():
    entries = long_grouping("003/RULER-57").entries
    assert [sum(length == k * K for _, length in entries) for k in (1, 2, 4, 8, 16)] == [10, 11, 12, 12, 12]
    assert not any(task == "cwe" for task, _ in entries)
    assert min(length for task, length in entries if task == "qa_1") == 2 * K
    assert min(length for task, length in entries if task == "qa_2") == 4 * K


def test_stand_ins_and_what_is_missing_are_named():
    scores = {(task, 16 * K): 50.0 for task in (*NIAH, *LISTS)} | {("qa_syn1", 16 * K): 0.0, ("qa_syn2", 16 * K): 0.0}
    found = long_average(long_grouping("000/RULER-13-16K"), scores)
    assert found.value == pytest.approx(50 * 11 / 13)
    assert found.about == "11 tasks + 2 synthetic"
    del scores["cwe", 16 * K], scores["qa_syn2", 16 * K]
    found = long_average(long_grouping("000/RULER-13-16K"), scores)
    assert found.about == "10 tasks + 1 synthetic; missing: cwe at 16384, qa_2 at 16384"
    assert found.value == pytest.approx(50 * 10 / 11)
    names = {average.name for average in long_averages(scores)}
    assert names == {"000/NIAH-8-16K", "000/RULER-13-16K", "001/RULER", "001/beyond-4K", "001/all", "003/RULER-57"} | {
        "004/Single-Native",
        "004/Multi-Key-Native",
    }
    assert long_averages({}) == []
    assert long_average(long_grouping("000/NIAH-8-32K"), {}).value is None


def test_names():
    assert set(QA) == {"qa_1", "qa_2"} and len(ALL) == 13 == len(set(ALL))
    assert all(entry[0] in (*ALL, *Babilong.names) for group in LONG_GROUPINGS.values() for entry in group.entries)
    with pytest.raises(ValueError, match="nearest: 003/RULER-57"):
        long_grouping("003/RULER57")
