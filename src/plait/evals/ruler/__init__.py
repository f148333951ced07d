"""RULER (Hsieh et al. 2024), generated offline with the model's own tokenizer. No torch.

Tasks, sizes, prompts and scoring are the published ones; every line of code, the prose and the words are plait's own.
Where the public generator is coarse or depends on what ran before, this one does not: see `Ruler.sample`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path

from plait.evals.counting import Counter, Encodes, Plan, TooShort, Units, fill
from plait.evals.prose import Prose, rng_of
from plait.evals.ruler import lists, qa
from plait.evals.ruler.niah import NOISE, Niah, as_line
from plait.evals.samples import Sample
from plait.fields import suggest

NIAH: Mapping[str, Niah] = {
    "niah_single_1": Niah(haystack="noise"),
    "niah_single_2": Niah(haystack="prose"),
    "niah_single_3": Niah(haystack="prose", value="uuid"),
    "niah_multikey_1": Niah(haystack="prose", keys=4),
    "niah_multikey_2": Niah(haystack="needles"),
    "niah_multikey_3": Niah(haystack="needles", key="uuid", value="uuid"),
    "niah_multivalue": Niah(haystack="prose", values=4),
    "niah_multiquery": Niah(haystack="prose", keys=4, queries=4),
}
LISTS: Mapping[str, Callable[[Ruler, random.Random, int], Plan]] = {"vt": lists.vt, "cwe": lists.cwe, "fwe": lists.Fwe}
QA = {"qa_1": "qa_syn1", "qa_2": "qa_syn2"}
"""the published task -> what stands for it where the user has no data, with one hop and two"""


class Ruler:
    """The 13 tasks for one tokenizer.

    Args:
        tokenizer: of plait.model.tokens, or anything with its `encode`
        seed: of all draws
        haystack: a text of the user's (file or folder, as plait data build reads them) instead of plait's own prose
        qa_data: files in the forms of SQuAD (makes qa_1) and HotpotQA (qa_2); a task without one is qa_syn1 or qa_syn2
    """

    def __init__(
        self, tokenizer: Encodes, *, seed: int = 0, haystack: Path | None = None, qa_data: Sequence[Path] = ()
    ):
        self.seed = seed
        self.counter = Counter(tokenizer)
        self.prose = Prose(haystack)
        self.documents: dict[str, qa.Documents] = {}
        for path in qa_data:
            task, found = qa.read_documents(path)
            if task in self.documents:
                raise ValueError(f"qa_data: {path} is a second file for {task}; give one of SQuAD's, one of HotpotQA's")
            self.documents[task] = found
        self.prose_units = self.prose.units(self.counter)
        self.noise_units = Units(repeat(NOISE), self.counter, as_line)
        asked = tuple(name if name in self.documents else stand_in for name, stand_in in QA.items())
        self.names = (*NIAH, *LISTS, *asked)

    def sample(self, task: str, length: int, index: int) -> Sample:
        """A pure function of (task, length, index) and what the object was made of: tokenizer, seed and texts.

        The prompt and the longest answer take at most `length` tokens, counted on the whole prompt with what the
        tokenizer adds to it, and leave less than one unit of the haystack free: a word, a line of noise, a needle, a
        word of a list as often as it comes, a document. ValueError in a line: no such task, too small a length.
        """
        if task in QA and task not in self.names:
            raise ValueError(f"task = {task}; it needs its questions, --qa-data FILE; without them there is {QA[task]}")
        if task not in self.names:
            raise ValueError(f"task = {task!r}; {suggest(task, self.names)}")
        rng = rng_of(self.seed, task, length, index)
        plan = self._plan(task, rng, length, index)
        try:
            draft, tokens = fill(plan, length, self.counter)
        except TooShort as error:
            raise ValueError(
                f"length = {length}: {task} takes at least {error.needed} tokens, prompt and answer, with this"
                " tokenizer"
            ) from None
        return Sample(task, length, index, draft.prompt, draft.answers, plan.max_new_tokens, tokens, draft.depth)

    def _plan(self, task: str, rng: random.Random, length: int, index: int) -> Plan:
        if task in NIAH:
            return NIAH[task].plan(self, rng, length)
        if task in LISTS:
            return LISTS[task](self, rng, length)
        if task in self.documents:
            return self.documents[task].plan(self, rng, index)
        return qa.synthetic(self, rng, hops=1 if task == QA["qa_1"] else 2)

    def score(self, sample: Sample, output: str) -> float:
        return score(sample.task, sample.answers, output)


def score(task: str, answers: Sequence[str], output: str) -> float:
    """0 to 100, as published: the share of the answers that the output has in it, upper and lower case being one; of
    tasks on documents, whether it has any of them. Control characters count as ends of lines."""
    said = re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip().lower()
    found = [answer.lower() in said for answer in answers]
    return 100.0 * (any(found) if task.startswith("qa_") else sum(found) / len(found))
