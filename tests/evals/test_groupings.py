"""The papers' averages: from their own per-task numbers comes their own average."""

from __future__ import annotations

import pytest

from plait.evals.groupings import GROUPINGS, average, grouping

# The first row of the tables that the groupings name, in the order of the members, and the printed average.
PRINTED = {
    # 000, table 13, Full at S4
    "000/short-19": (
        [
            *(26.35, 27.23, 25.63, 30.63, 64.09, 39.51, 23.73, 52.17, 27.60, 19.25, 38.08, 56.97),
            *(25.07, 25.64, 51.00, 48.74, 50.00, 50.00, 42.82),
        ],
        38.13,
    ),
    # 001, table 3, RoPE at 376M
    "001/short-12": ([36.8, 40.2, 65.9, 33.8, 52.2, 39.7, 26.4, 26.3, 39.2, 27.4, 42.1, 24.6], 37.9),
    # 003, tables 14 and 15, 180M vanilla
    "003/CSR-7": ([36.36, 22.44, 27.38, 58.27, 58.87, 51.07, 9.94], 37.76),
    "003/Recall-6": ([9.09, 0.54, 13.40, 21.74, 13.08, 4.50], 10.39),
    # 004, tables 14 and 15 (FA & LA, Lightning); the averages are in table 2
    "004/Easy-6": ([41.38, 71.13, 58.81, 52.88, 72.74, 61.40], 59.72),
    "004/Hard-4": ([48.80, 13.79, 10.00, 6.60], 19.80),
    # 000, table 12, Full at S4
    "000/longbench-21": (
        [
            *(2.82, 14.07, 16.06, 13.19, 6.70, 8.36, 3.64, 18.09, 15.33, 14.99, 17.74, 0.90, 71.50, 4.15, 12.74, 6.00),
            *(1.98, 3.83, 3.59, 43.88, 37.33),
        ],
        15.09,
    ),
    # 001, table 18, RoPE at 376M
    "001/longbench-16": (
        [0.6, 5.0, 4.1, 1.0, 2.2, 0.5, 2.8, 4.4, 11.3, 2.0, 3.2, 5.2, 1.0, 4.5, 22.0, 18.7],
        5.5,
    ),
}


def results(name: str, numbers: list[float]) -> tuple[dict, dict]:
    """As the harness has them; a member of several tasks gets two that average to its number, or more."""
    scores, groups = {}, {}
    for member, number in zip(grouping(name).members, numbers, strict=True):
        key = f"{member.metric},{member.filter}"
        tasks = member.parts or ([f"{member.task}_1", f"{member.task}_2"] if member.macro else [member.task])
        if member.macro:
            groups[member.task] = list(tasks)
            scores[member.task] = {key: -1.0}  # the harness's own figure, which is not asked for
        for i, task in enumerate(tasks):
            shift = (-1) ** i if len(tasks) % 2 == 0 or i < len(tasks) - 1 else 0
            scores[task] = {key: number + shift}
    return scores, groups


@pytest.mark.parametrize("name", GROUPINGS)
def test_the_papers_numbers_give_the_papers_average(name):
    numbers, printed = PRINTED[name]
    scores, groups = results(name, numbers)
    found = average(grouping(name), scores, groups)
    digits = 1 if name.startswith("001") else 2
    assert found.value == pytest.approx(printed, abs=0.51 * 10**-digits)
    assert found.missing == ()
    assert len(found.found) == len(numbers) == int(name.rpartition("-")[2])


def test_what_is_missing_is_named():
    scores = {"arc_easy": {"acc_norm,none": 0.5}, "piqa": {"acc,none": 0.9}, "boolq": {"acc,none": 0.7}}
    found = average(grouping("003/CSR-7"), scores)
    assert found.value == pytest.approx(0.6)  # piqa counts by its normalized accuracy, which is not there
    assert found.found == ("ARC-E", "BoolQ")
    assert found.missing == ("ARC-C", "Hella.", "PIQA", "Wino.", "LAMBADA")
    assert average(grouping("003/CSR-7"), {}).value is None


def test_a_group_with_a_part_missing_is_missing():
    scores = {"mmlu_a": {"acc,none": 0.25}, "mmlu": {"acc,none": 0.3}}
    found = average(grouping("000/short-19"), scores, {"mmlu": ["mmlu_a", "mmlu_b"]})
    assert "MMLU" in found.missing
    assert average(grouping("001/short-12"), scores, {"mmlu": ["mmlu_a", "mmlu_b"]}).found == ("MMLU",)


def test_the_standard_error_is_that_of_a_mean_of_independent_scores():
    members = grouping("004/Hard-4").members
    scores = {
        m.task: {f"{m.metric},{m.filter}": 0.5, f"{m.metric}_stderr,{m.filter}": error}
        for m, error in zip(members, (0.03, 0.04, 0.0, 0.12), strict=True)
    }
    assert average(grouping("004/Hard-4"), scores).stderr == pytest.approx(0.13 / 4)
    del scores["mmlu"]["acc_stderr,none"]
    assert average(grouping("004/Hard-4"), scores).stderr is None


def test_the_papers_limits():
    assert {name for name, each in GROUPINGS.items() if each.max_length == 2048} == {"001/short-12", "003/Recall-6"}
    long = grouping("001/longbench-16")
    assert (long.max_length - long.max_new_tokens, long.max_new_tokens, long.cut) == (31_500, 500, "middle")
    assert {m.name for each in GROUPINGS.values() for m in each.members if not m.in_harness} == {
        *("RACE-middle", "TriviaQA", "DROP", "NQ"),
    }


def test_a_group_that_is_not_known():
    with pytest.raises(ValueError, match="group = '003/csr7'; nearest: 003/CSR-7"):
        grouping("003/csr7")
