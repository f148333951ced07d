"""RULER's two tasks of questions on documents, from the user's SQuAD and HotpotQA files; without them, questions on
documents that a program writes, under names of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.evals.counting import Draft, Refill, Units
from plait.files import read_json

if TYPE_CHECKING:
    from plait.evals.ruler import Ruler

ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
QA = ASK + "\n\nThe following are given documents.\n\n{context}\n\n" + ASK + "\n\nQuestion: {question} Answer:"
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    """documents that must be there"""
    near: tuple[int, ...] = ()
    """documents that distract first"""


@dataclass(frozen=True)
class Documents:
    questions: tuple[Question, ...]
    texts: tuple[str, ...]

    def plan(self, ruler: Ruler, rng: random.Random, index: int) -> Refill:
        """The index-th question, and from the first again where there are no more."""
        question = self.questions[index % len(self.questions)]
        others = self._others(question, rng)
        own = [self.texts[i] for i in question.own]
        return documents_plan(ruler, own, others, question.text, question.answers, rng.random())

    def _others(self, question: Question, rng: random.Random) -> Iterator[str]:
        """Distractors: near ones, then all others, and then all again, each time in another order."""
        if len(self.texts) == len(question.own):
            raise ValueError("qa_data: no documents beside those of one question; the file must have more")
        yield from (self.texts[i] for i in rng.sample(question.near, len(question.near)))
        had = {*question.own, *question.near}
        while True:
            yield from (self.texts[i] for i in _shuffled(rng, len(self.texts)) if i not in had)
            had = {*question.own}


def _shuffled(rng: random.Random, n: int) -> Iterator[int]:
    """0 to n - 1 in random order; what is not asked for is not drawn."""
    moved: dict[int, int] = {}
    for i in range(n):
        j = rng.randrange(i, n)
        moved[i], moved[j] = moved.get(j, j), moved.get(i, i)
        yield moved[i]


def documents_plan(
    ruler: Ruler, own: Sequence[str], others: Iterator[str], question: str, answers: tuple[str, ...], key: float
) -> Refill:
    units = Units(others, ruler.counter, lambda i, text: _numbered(len(own) + i + 1, text))

    def build(n: int) -> Draft:
        documents = [*((text, True) for text in own), *((text, False) for text in units.first(n))]
        random.Random(key).shuffle(documents)
        first = next(i for i, (_, is_own) in enumerate(documents) if is_own)
        context = "".join(_numbered(i, text) for i, (text, _) in enumerate(documents, 1)).strip()
        return Draft(QA.format(context=context, question=question), answers, first / max(1, len(documents) - 1))

    return Refill(MAX_NEW_TOKENS, units, build)


def _numbered(i: int, text: str) -> str:
    return f"\n\nDocument {i}:\n{text}"


def read_documents(path: Path) -> tuple[str, Documents]:
    """'qa_1' for a file as SQuAD has them, 'qa_2' as HotpotQA has them; ValueError in a line for any other."""
    data = read_json(path)
    try:
        if isinstance(data, dict) and isinstance(data.get("data"), list):
            task, found = "qa_1", _squad(data["data"])
        elif isinstance(data, list) and data and "context" in data[0]:
            task, found = "qa_2", _hotpot(data)
        else:
            raise KeyError("data")
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"qa_data {path}: neither SQuAD's form (data, paragraphs, qas) nor HotpotQA's (question, answer, context):"
            f" {type(error).__name__} {error}"
        ) from None
    if not found.questions:
        raise ValueError(f"qa_data {path}: no question with an answer in it")
    return task, found


def _squad(articles: list[dict[str, Any]]) -> Documents:
    texts: dict[str, int] = {}
    questions = []
    for article in articles:
        own = [texts.setdefault(paragraph["context"], len(texts)) for paragraph in article["paragraphs"]]
        for at, paragraph in zip(own, article["paragraphs"], strict=True):
            near = tuple(i for i in own if i != at)
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible"):
                    questions.append(Question(asked["question"], answers, (at,), near))
    return Documents(tuple(questions), tuple(texts))


def _hotpot(rows: list[dict[str, Any]]) -> Documents:
    texts: dict[str, int] = {}
    questions = []
    for row in rows:
        written = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
        own = tuple(dict.fromkeys(texts.setdefault(text, len(texts)) for text in written))
        questions.append(Question(row["question"], (row["answer"],), own))
    return Documents(tuple(questions), tuple(texts))


FIRST = ("Bel", "Cor", "Dar", "Els", "Fen", "Gar", "Hal", "Ing", "Jor", "Kel", "Lor", "Mar", "Nor", "Or", "Per", "Ros")
MIDDLE = ("a", "e", "i", "o", "an", "en", "il", "or", "ut", "ar", "eth", "und")
PERSON = ("bert", "da", "dine", "las", "mir", "na", "ric", "sa", "tha", "vin", "wen", "zo")
TOWN = ("bridge", "bury", "dale", "ford", "gate", "ham", "haven", "mouth", "stead", "ton", "well", "wick")
FIRM = ("co", "dex", "gen", "lux", "met", "nova", "rex", "tec", "tron", "via", "vox", "zon")
TRADES = ("baker", "botanist", "carpenter", "composer", "doctor", "engineer", "gardener", "lawyer", "painter")
GOODS = ("bicycles", "boats", "candles", "carpets", "clocks", "furniture", "lamps", "paper", "pianos", "tea", "tools")
HABITS = ("collects maps", "keeps bees", "paints", "plays chess", "rows", "sings in a choir", "walks every morning")


def synthetic(ruler: Ruler, rng: random.Random, hops: int) -> Refill:
    """Documents on people and firms that do not exist. One hop: where a person was born. Two: where the firm that a
    person founded has its head office, which another document says."""
    seen: set[str] = set()
    person, firm = _name(rng, PERSON, seen), _name(rng, FIRM, seen)
    about_person, born = _about_person(rng, person, firm, seen)
    about_firm, office = _about_firm(rng, firm, seen)
    if hops == 1:
        own, answer, question = [about_person], born, f"In which town was {person} born?"
    else:
        own, answer = [about_person, about_firm], office
        question = f"In which town is the head office of the company that {person} founded?"
    return documents_plan(ruler, own, _strangers(rng, seen, hops), question, (answer,), rng.random())


def _strangers(rng: random.Random, seen: set[str], hops: int) -> Iterator[str]:
    for _ in count():
        person, firm = _name(rng, PERSON, seen), _name(rng, FIRM, seen)
        yield _about_person(rng, person, firm, seen)[0]
        if hops == 2:
            yield _about_firm(rng, firm, seen)[0]


def _about_person(rng: random.Random, person: str, firm: str, seen: set[str]) -> tuple[str, str]:
    born, home, year = _name(rng, TOWN, seen), _name(rng, TOWN, seen), rng.randrange(1880, 1990)
    text = (
        f"{person} was born in {born} in {year}, trained as a {rng.choice(TRADES)} and later lived in {home}."
        f" In {year + rng.randrange(25, 45)} {person} founded the company {firm}."
        f" In spare time {person} {rng.choice(HABITS)}."
    )
    return text, born


def _about_firm(rng: random.Random, firm: str, seen: set[str]) -> tuple[str, str]:
    office, works = _name(rng, TOWN, seen), _name(rng, TOWN, seen)
    text = (
        f"{firm} is a company that makes {rng.choice(GOODS)}. Its head office is in {office}, its works are in {works}."
        f" It has {rng.randrange(20, 900)} employees."
    )
    return text, office


def _name(rng: random.Random, ends: Sequence[str], seen: set[str]) -> str:
    """One that is not yet in `seen`, and then is."""
    for tries in count():
        parts = chain([rng.choice(FIRST)], (rng.choice(MIDDLE) for _ in range(1 + tries // 4)), [rng.choice(ends)])
        name = "".join(parts)
        if name not in seen:
            seen.add(name)
            return name
    raise AssertionError
