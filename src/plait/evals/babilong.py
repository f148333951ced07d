"""BABILong (Kuratov et al. 2024) on a world made by program: facts of a story at random places of a book. No torch.

The name is babilong_gen, as neither bAbI's own stories nor the published background text are in it. Prompts are plait's
own; labels and scoring are as published.
"""

from __future__ import annotations

from pathlib import Path

from plait.evals.babi import LABELS, STORIES
from plait.evals.counting import Counter, Draft, Encodes, Refill, TooShort, fill
from plait.evals.prose import Prose, rng_of
from plait.evals.samples import Sample
from plait.fields import suggest

PREFIX = "babilong_gen_"
MAX_NEW_TOKENS = 20
QUESTION = "\n\nQuestion: "
PROMPT = "{about} Answer the question at the end with one word.\n\n{example}\n\nText: {context}{question}\nAnswer:"

ABOUT = {
    "qa1": "Somewhere in the text below are facts about where people go. Only the latest place of a person counts.",
    "qa2": "Somewhere in the text below are facts about where people go and about things that they take along and drop."
    " A thing is where it was dropped, or where the person is who has it.",
    "qa3": "Somewhere in the text below are facts about where people go and about things that they take along and drop."
    " Follow a thing from room to room, in the order of the text.",
    "qa4": "Somewhere in the text below are facts about which room lies beside which.",
    "qa5": "Somewhere in the text below are facts about people who give things to each other.",
}
EXAMPLES = {
    "qa1": (
        "Emily went to the hallway. Paul moved to the garden. Emily journeyed to the kitchen.",
        "Where is Emily?",
        "kitchen",
    ),
    "qa2": (
        "Paul went to the office. Paul got the lamp there. Paul travelled to the garden. Paul dropped the lamp.",
        "Where is the lamp?",
        "garden",
    ),
    "qa3": (
        "Emily went to the bedroom. Emily took the lamp. Emily moved to the office. Emily went to the kitchen.",
        "Where was the lamp before the kitchen?",
        "office",
    ),
    "qa4": (
        "The garden is east of the office. The kitchen is west of the office.",
        "What is east of the office?",
        "garden",
    ),
    "qa5": (
        "Paul went to the garden. Emily moved to the garden. Paul got the lamp there. Paul handed the lamp to Emily.",
        "Who did Paul give the lamp to?",
        "Emily",
    ),
}


class Babilong:
    """The five tasks for one tokenizer.

    Args:
        tokenizer: of plait.model.tokens, or anything with its `encode`
        seed: of all draws
        haystack: a text of the user's (file or folder, as plait data build reads them) instead of plait's own prose
    """

    names = tuple(PREFIX + name for name in STORIES)

    def __init__(self, tokenizer: Encodes, *, seed: int = 0, haystack: Path | None = None):
        self.seed, self.counter, self.prose = seed, Counter(tokenizer), Prose(haystack)
        self.units = self.prose.units(self.counter)

    def sample(self, task: str, length: int, index: int) -> Sample:
        """A pure function of (task, length, index) and what the object was made of.

        Length 0 is the facts alone; otherwise prompt and answer take at most `length` tokens and leave less than a
        word of the book free. ValueError in a line: no such task, too small a length.
        """
        if task not in self.names:
            raise ValueError(f"task = {task!r}; {suggest(task, self.names)}")
        plan = self._plan(task, length, index)
        if length == 0:
            draft = plan.build(0)
            tokens = self.counter.count(draft.prompt)
        else:
            try:
                draft, tokens = fill(plan, length, self.counter)
            except TooShort as error:
                raise ValueError(
                    f"length = {length}: {task} takes at least {error.needed} tokens, prompt and answer, with this"
                    " tokenizer; 0 is the facts alone"
                ) from None
        return Sample(task, length, index, draft.prompt, draft.answers, plan.max_new_tokens, tokens, draft.depth)

    def _plan(self, task: str, length: int, index: int) -> Refill:
        kind, rng = task.removeprefix(PREFIX), rng_of(self.seed, task, length, index)
        story = STORIES[kind](rng)
        places = sorted(rng.random() for _ in story.facts)
        sentence = rng.randrange(len(self.prose.starts))
        told, asked, answered = EXAMPLES[kind]
        example = f"Text: {told}{QUESTION}{asked}\nAnswer: {answered}."

        def build(n: int) -> Draft:
            context, question = self.prose.insert(n, story.facts, places, sentence), QUESTION + story.question
            prompt = PROMPT.format(about=ABOUT[kind], example=example, context=context, question=question)
            return Draft(prompt, (story.answer,), places[0])

        return Refill(MAX_NEW_TOKENS, self.units, build, start=self.prose.starts[sentence])

    def score(self, sample: Sample, output: str) -> float:
        question = sample.prompt.rpartition(QUESTION)[2]
        labels = LABELS[sample.task.removeprefix(PREFIX)]
        return 100.0 * is_right(sample.answers[0], output, question, labels)


def is_right(target: str, output: str, question: str, labels: tuple[str, ...]) -> bool:
    """As published: of the labels that the first sentence of the output has in it, those of the question left out, the
    target is the only one. Several targets stand with commas between and must all be there."""
    said = output.lower()
    for end in (".", "<context>", "<example>", "question"):
        said = said.split(end)[0]
    found = {label.lower() for label in labels if label.lower() in said}
    found -= {label.lower() for label in labels if label.lower() in question.lower()}
    return found == set(target.lower().split(","))
