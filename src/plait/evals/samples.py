"""One question of a generated long-context benchmark, what a set of such tasks offers, and its file form. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """A prompt and what its answer must hold.

    length is what was asked for, tokens of prompt and answer together; answers are all wanted or alternatives, as the
    task's rule says; depth is where the (first) needle stands, 0 to 1; samples of one document key have prompts that
    begin with the same text, which needs one prefill.
    """

    task: str
    length: int
    index: int
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    prompt_tokens: int
    depth: float | None = None
    document: str | None = None

    def to_json(self) -> str:
        """One line: RULER's names where it has one (index, input, outputs, length), ours beside them."""
        row = {
            "index": self.index,
            "input": self.prompt,
            "outputs": self.answers,
            "length": self.length,
            "task": self.task,
            "max_new_tokens": self.max_new_tokens,
            "prompt_tokens": self.prompt_tokens,
            "depth": self.depth,
            "document": self.document,
        }
        return json.dumps(row, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Sample:
        """The sample of a line that to_json wrote. ValueError in a line where it is none."""
        try:
            row: dict[str, Any] = json.loads(line)
            return cls(
                task=row["task"],
                length=row["length"],
                index=row["index"],
                prompt=row["input"],
                answers=tuple(row["outputs"]),
                max_new_tokens=row["max_new_tokens"],
                prompt_tokens=row["prompt_tokens"],
                depth=row.get("depth"),
                document=row.get("document"),
            )
        except KeyError as missing:
            raise ValueError(f"a sample has no field {missing}; a line of plait data ruler has it") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"a sample is no line of plait data ruler ({error})") from None


class Tasks(Protocol):
    """What RULER and BABILong are to whoever runs them."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def sample(self, task: str, length: int, index: int) -> Sample:
        """A pure function of (task, length, index) and of the tokenizer, seed and texts that the object holds."""
        ...

    def score(self, sample: Sample, output: str) -> float:
        """0 to 100."""
        ...
