"""The papers' averages over short tasks and LongBench, by name: which tasks, which metric of each, within what limits.
No torch.

Tasks are named as in lm-evaluation-harness 0.4.13. What a paper leaves open is not filled in silently: `unstated` says
what was left open and how it is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.fields import suggest

Cut = Literal["left", "middle"]


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    """what the paper calls it"""
    task: str
    """the harness's task or group; where it has none, the name to give to a local one"""
    metric: str = "acc"
    filter: str = "none"
    """the harness's filter of the answers that the metric is taken of"""
    in_harness: bool = True
    parts: tuple[str, ...] = ()
    """the tasks that are averaged, where the harness has no one task or group for it"""
    macro: bool = False
    """of a group: the mean over its tasks, each counting the same; else the harness's own figure"""

    @property
    def tasks(self) -> tuple[str, ...]:
        """What is to be run for it."""
        return self.parts or (self.task,)


@dataclass(frozen=True, kw_only=True)
class Grouping:
    name: str
    source: str
    members: tuple[Member, ...]
    num_fewshot: int | None = None
    """examples in the prompt; None: each task's own"""
    max_length: int | None = None
    """tokens of prompt and answer; None: the model's context"""
    max_new_tokens: int | None = None
    """tokens of an answer; None: each task's own"""
    cut: Cut = "left"
    """where a prompt that is too long loses tokens"""
    unstated: str = ""


def _members(metric: str, *names: tuple[str, str]) -> tuple[Member, ...]:
    return tuple(Member(name=name, task=task, metric=metric) for name, task in names)


# 000, appendix E, table 13: options chosen by length-normalized log-likelihood; macro averages of MMLU, C-Eval, CMMLU.
# Options of those three, of CommonsenseQA (letters) and of WinoGrande (one ending) are equally long: acc is acc_norm.
# The harness's race is RACE-high, of which it asks one question an article.
_SHORT_19 = Grouping(
    name="000/short-19",
    source="000, appendix E, table 13",
    members=(
        Member(name="MMLU", task="mmlu", macro=True),
        Member(name="C-Eval", task="ceval-valid", macro=True),
        Member(name="CMMLU", task="cmmlu", macro=True),
        *_members("acc_norm", ("HellaSwag", "hellaswag"), ("PIQA", "piqa"), ("ARC-Easy", "arc_easy")),
        Member(name="ARC-Challenge", task="arc_challenge", metric="acc_norm"),
        Member(name="WinoGrande", task="winogrande"),
        Member(name="OpenBookQA", task="openbookqa", metric="acc_norm"),
        Member(name="CommonsenseQA", task="commonsense_qa"),
        *_members("acc_norm", ("SIQA", "social_iqa"), ("StoryCloze", "storycloze_2016")),
        Member(name="RACE-middle", task="race_middle", metric="acc_norm", in_harness=False),
        *_members("acc_norm", ("RACE-high", "race"), ("COPA", "copa"), ("RTE", "rte"), ("CB", "cb")),
        *_members("acc_norm", ("WiC", "wic"), ("MultiRC", "multirc")),
    ),
    unstated="prompts, examples in the prompt, and what a length is measured in (the harness: characters)",
)

# 001, appendix B, tables 3 to 6: all within a 2k context; the column heads are all that is said of the tasks.
_SHORT_12 = Grouping(
    name="001/short-12",
    source="001, appendix B, tables 3-6",
    members=(
        Member(name="TQA", task="truthfulqa_mc2"),
        Member(name="LMD", task="lambada_openai"),
        *_members("acc", ("PIQA", "piqa"), ("Hella", "hellaswag"), ("Wino", "winogrande"), ("ARC-e", "arc_easy")),
        *_members("acc", ("ARC-c", "arc_challenge"), ("GPQA", "gpqa_main_zeroshot"), ("SIQA", "social_iqa")),
        Member(name="OBQA", task="openbookqa"),
        Member(name="SG", task="super_glue", parts=("boolq", "cb", "copa", "multirc", "sglue_rte", "wic", "wsc")),
        Member(name="MMLU", task="mmlu"),
    ),
    max_length=2048,
    unstated="metrics (accuracy is taken), examples in the prompt, which TruthfulQA (mc2), LAMBADA (openai), GPQA"
    " (main) and SuperGLUE tasks (the seven that the harness has an accuracy of)",
)

# 003, section 12 and table 14: normalized accuracy on the first four, accuracy on the rest; no demonstrations.
_CSR_7 = Grouping(
    name="003/CSR-7",
    source="003, section 12, table 14",
    members=(
        *_members("acc_norm", ("ARC-E", "arc_easy"), ("ARC-C", "arc_challenge"), ("Hella.", "hellaswag")),
        Member(name="PIQA", task="piqa", metric="acc_norm"),
        *_members("acc", ("BoolQ", "boolq"), ("Wino.", "winogrande"), ("LAMBADA", "lambada_openai")),
    ),
    num_fewshot=0,
    unstated="which LAMBADA (openai is taken)",
)

# 003, section 12: Based's suite, contains, 2,048 tokens. The harness's triviaqa, drop and nq_open ask without the
# document, so they are others; Based's own fork has these three under the names below.
_RECALL_6 = Grouping(
    name="003/Recall-6",
    source="003, section 12, table 15",
    members=(
        *_members("contains", ("SWDE", "swde"), ("FDA", "fda"), ("SQuAD", "squad_completion")),
        Member(name="TriviaQA", task="based_triviaqa", metric="contains", in_harness=False),
        Member(name="DROP", task="based_drop", metric="contains", in_harness=False),
        Member(name="NQ", task="based_nq_2048", metric="contains", in_harness=False),
    ),
    num_fewshot=0,
    max_length=2048,
    unstated="where documents over 2,048 tokens are cut (the left end goes here)",
)

# 004, section 5.1: norm scores for ARC-Challenge and HellaSwag; the harness's default configurations.
_EASY_6 = Grouping(
    name="004/Easy-6",
    source="004, section 5.1, table 14",
    members=(
        Member(name="ARC-C", task="arc_challenge", metric="acc_norm"),
        Member(name="ARC-E", task="arc_easy"),
        Member(name="HellaSwag", task="hellaswag", metric="acc_norm"),
        *_members("acc", ("LAMBADA", "lambada_openai"), ("PIQA", "piqa"), ("Winogrande", "winogrande")),
    ),
)

_HARD_4 = Grouping(
    name="004/Hard-4",
    source="004, section 5.1, table 15",
    members=(
        Member(name="MMLU", task="mmlu"),
        Member(name="BBH", task="bbh", metric="exact_match", filter="get-answer"),
        Member(name="MBPP", task="mbpp", metric="pass_at_1"),
        Member(name="GSM8k", task="gsm8k", metric="exact_match", filter="strict-match"),
    ),
    unstated="which of GSM8K's two readings of an answer (strict-match is taken)",
)


def _longbench(*names: str) -> tuple[Member, ...]:
    return tuple(Member(name=name, task=f"longbench_{name}", metric="score") for name in names)


# 000, appendix E, table 12: the metrics of LongBench's own scripts.
_LONGBENCH_21 = Grouping(
    name="000/longbench-21",
    source="000, appendix E, table 12",
    members=_longbench(
        *("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
        *("hotpotqa", "2wikimqa", "musique", "dureader"),
        *("gov_report", "qmsum", "multi_news", "vcsum"),
        *("trec", "triviaqa", "samsum", "lsht"),
        *("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
        *("lcc", "repobench-p"),
    ),
    cut="middle",
    unstated="where prompts beyond the context are cut (in the middle here, as LongBench's own scripts do)",
)

# 001, appendix A.1, tables 18 to 23: at most 31,500 tokens in and 500 out.
_LONGBENCH_16 = Grouping(
    name="001/longbench-16",
    source="001, appendix A.1, tables 18-23",
    members=_longbench(
        *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
        *("gov_report", "qmsum", "multi_news", "trec", "triviaqa", "samsum"),
        *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
    ),
    max_length=32_000,
    max_new_tokens=500,
    cut="middle",
    unstated="where prompts are cut (in the middle here, as LongBench's own scripts do)",
)

GROUPINGS: Mapping[str, Grouping] = {
    grouping.name: grouping
    for grouping in (
        *(_SHORT_19, _SHORT_12, _CSR_7, _RECALL_6, _EASY_6, _HARD_4),
        *(_LONGBENCH_21, _LONGBENCH_16),
    )
}


def grouping(name: str) -> Grouping:
    """ValueError in a line where there is none of this name."""
    if name not in GROUPINGS:
        raise ValueError(f"group = {name!r}; {suggest(name, GROUPINGS)}")
    return GROUPINGS[name]


@dataclass(frozen=True)
class Average:
    value: float | None
    """the mean over the tasks that there are; None: there are none"""
    stderr: float | None
    """None where a task has none"""
    found: tuple[str, ...]
    missing: tuple[str, ...]
    """the paper's names of both; only with none missing is the value the paper's average"""


Scores = Mapping[str, Mapping[str, float]]
"""task -> 'metric,filter' and 'metric_stderr,filter' -> value, as in the harness's results"""


def average(grouping: Grouping, scores: Scores, groups: Mapping[str, Sequence[str]] | None = None) -> Average:
    """The mean over a grouping's tasks. groups: the tasks of each of the harness's groups."""
    values, errors, found = [], [], []
    for member in grouping.members:
        value, error = _score(member, scores, member.parts or (groups or {}).get(member.task, ()))
        if value is not None:
            values.append(value)
            errors.append(error)
            found.append(member.name)
    missing = tuple(member.name for member in grouping.members if member.name not in found)
    value = sum(values) / len(values) if values else None
    return Average(value, _of_mean(errors), tuple(found), missing)


def _score(member: Member, scores: Scores, parts: Sequence[str]) -> tuple[float | None, float | None]:
    """Value and standard error; None, None where it is not there as a whole."""
    keys = f"{member.metric},{member.filter}", f"{member.metric}_stderr,{member.filter}"
    averaged = parts if member.macro or member.parts else ()
    rows = [scores.get(task, {}) for task in averaged or (member.task,)]
    values = [row[keys[0]] for row in rows if keys[0] in row]
    if len(values) < len(rows):
        return None, None
    return sum(values) / len(values), _of_mean([row.get(keys[1]) for row in rows])


def _of_mean(errors: Sequence[float | None]) -> float | None:
    """Of the mean of independent values with these standard errors."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(errors) else None
