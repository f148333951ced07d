"""BABILong: stories with one answer, facts in order in the text, lengths, and scoring."""

from __future__ import annotations

import random
import re

import pytest

from plait.evals.babi import GIVERS, LABELS, OPPOSITE, PEOPLE, ROOMS, STORIES, THINGS
from plait.evals.babilong import QUESTION, Babilong, is_right
from plait.evals.counting import Bytes

GOT, DROPPED = r"(?:got|grabbed|picked up|took)", r"(?:dropped|discarded|left|put down)"


def retold(facts: tuple[str, ...]) -> tuple[dict[str, str], dict[str, list[str]], list[tuple[str, str, str]]]:
    """Who is where, where each thing has been, and who gave what to whom, out of the sentences alone."""
    room: dict[str, str] = {}
    holder: dict[str, str] = {}
    been: dict[str, list[str]] = {}
    given = []
    for fact in facts:
        if moved := re.fullmatch(r"(\w+) (?:moved|went|went back|journeyed|travelled) to the (\w+)\.", fact):
            assert room.get(moved[1]) != moved[2]
            room[moved[1]] = moved[2]
            for thing, who in holder.items():
                if who == moved[1]:
                    been[thing].append(moved[2])
        elif got := re.fullmatch(rf"(\w+) {GOT} the (\w+)(?: there)?\.", fact):
            assert got[2] not in holder and been.get(got[2], [room[got[1]]])[-1] == room[got[1]]
            holder[got[2]] = got[1]
            been.setdefault(got[2], [room[got[1]]])
        elif dropped := re.fullmatch(rf"(\w+) {DROPPED} the (\w+)(?: there)?\.", fact):
            assert holder.pop(dropped[2]) == dropped[1]
        else:
            gave = re.fullmatch(r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\.", fact)
            assert holder[gave[2]] == gave[1] and room[gave[1]] == room[gave[3]] and gave[1] != gave[3]
            holder[gave[2]] = gave[3]
            given.append((gave[1], gave[2], gave[3]))
    return room, been, given


@pytest.mark.parametrize("seed", range(60))
def test_stories_have_the_answer_they_say(seed):
    story = STORIES["qa1"](random.Random(seed))
    room, _, _ = retold(story.facts)
    assert len(story.facts) in (2, 4, 6, 8, 10) and story.answer == room[story.question[9:-1]]

    story = STORIES["qa2"](random.Random(seed))
    _, been, _ = retold(story.facts)
    assert story.answer == been[re.search(r"the (\w+)\?", story.question)[1]][-1]

    story = STORIES["qa3"](random.Random(seed))
    _, been, _ = retold(story.facts)
    thing, after = re.fullmatch(r"Where was the (\w+) before the (\w+)\?", story.question).groups()
    assert been[thing].count(after) == 1 and been[thing][been[thing].index(after) - 1] == story.answer != after

    story = STORIES["qa5"](random.Random(seed))
    _, _, given = retold(story.facts)
    patterns = {
        r"Who gave the (?P<thing>\w+) to (?P<to>\w+)\?": "who",
        r"Who gave the (?P<thing>\w+)\?": "who",
        r"Who did (?P<who>\w+) give the (?P<thing>\w+) to\?": "to",
        r"Who received the (?P<thing>\w+)\?": "to",
        r"What did (?P<who>\w+) give to (?P<to>\w+)\?": "thing",
    }
    (known, wanted), *rest = (
        (m.groupdict(), wanted) for pattern, wanted in patterns.items() if (m := re.fullmatch(pattern, story.question))
    )
    rows = [dict(zip(("who", "thing", "to"), row, strict=True)) for row in given]
    answers = {row[wanted] for row in rows if known.items() <= row.items()}
    assert answers == {story.answer} and not rest


@pytest.mark.parametrize("seed", range(60))
def test_rooms_in_a_line(seed):
    story = STORIES["qa4"](random.Random(seed))
    lies = set()
    for fact in story.facts:
        a, way, b = re.fullmatch(r"The (\w+) is (\w+) of the (\w+)\.", fact).groups()
        lies |= {(a, way, b), (b, OPPOSITE[way], a)}
    if asked := re.fullmatch(r"What is (\w+) of the (\w+)\?", story.question):
        found = {a for a, way, b in lies if (way, b) == asked.groups()}
    else:
        asked = re.fullmatch(r"What is the (\w+) (\w+) of\?", story.question)
        found = {b for a, way, b in lies if (a, way) == asked.groups()}
    assert found == {story.answer}
    rooms = {a for a, _, _ in lies}
    assert len(rooms) == 3 and len(story.facts) == 2


def test_stories_are_of_the_published_world():
    assert (len(PEOPLE), len(ROOMS), len(THINGS), len(GIVERS)) == (4, 6, 3, 4)
    for name, story in STORIES.items():
        answers = {story(random.Random(seed)).answer for seed in range(300)}
        assert answers <= set(LABELS[name]) and len(answers) >= 6


@pytest.fixture(scope="module")
def tasks() -> Babilong:
    return Babilong(Bytes())


@pytest.mark.parametrize("length", [0, 2048, 4096, 65_536])
@pytest.mark.parametrize("task", Babilong.names)
def test_facts_stand_in_order_in_a_full_text(tasks, task, length):
    sample = tasks.sample(task, length, 1)
    assert sample.prompt_tokens == len(sample.prompt.encode())
    if length:
        longest = max(len(word.encode()) + 1 for word in tasks.prose.words)
        assert 0 <= length - sample.prompt_tokens - sample.max_new_tokens < longest
    context = sample.prompt.rpartition("Text: ")[2].partition(QUESTION)[0]
    seed = tasks._plan(task, length, 1).build(0).prompt  # the same story without a book
    story = seed.rpartition("Text: ")[2].partition(QUESTION)[0]
    at, first = 0, None
    for fact in re.findall(r"[^.]+\.", story):
        at = context.index(fact.strip(), at)
        first = at if first is None else first
        assert at == 0 or context[at - 2] in ".!?\"')" or length == 0
    assert (context == story) == (length == 0)
    if length == 65_536:
        assert first / len(context) == pytest.approx(sample.depth, abs=0.1)
    assert sample.prompt.endswith("\nAnswer:")


def test_samples_depend_on_nothing_else(tasks):
    places = [(task, length, index) for task in Babilong.names for length in (0, 3000) for index in (0, 1)]
    first = {place: tasks.sample(*place) for place in places}
    other = Babilong(Bytes())
    assert {place: other.sample(*place) for place in reversed(places)} == first
    assert Babilong(Bytes(), seed=1).sample(*places[3]) != first[places[3]]


ROOM = "Where is Mary?"


@pytest.mark.parametrize(
    ("target", "output", "question", "right"),
    [
        ("kitchen", " Kitchen.", ROOM, True),
        ("kitchen", "The most recent location of Mary is kitchen. Before, the garden.", ROOM, True),
        ("kitchen", "kitchen or garden.", ROOM, False),
        ("kitchen", "garden", ROOM, False),
        ("kitchen", "", ROOM, False),
        ("kitchen", "in the kitchen, kitchen\nQuestion: Where is the garden?", ROOM, True),
        ("kitchen", "kitchen <example> garden", ROOM, True),
        ("office", "before the bathroom it was in the office", "Where was the apple before the bathroom?", True),
        ("office", "bathroom", "Where was the apple before the bathroom?", False),
        ("kitchen,garden", "garden and kitchen", ROOM, True),
        ("kitchen,garden", "garden", ROOM, False),
    ],
)
def test_scores_are_as_published(target, output, question, right):
    assert is_right(target, output, question, ROOMS) == right


def test_the_question_of_a_sample_is_its_own(tasks):
    for index in range(20):
        sample = tasks.sample("babilong_gen_qa5", 0, index)
        answer = sample.answers[0]
        asked = sample.prompt.rpartition(QUESTION)[2]
        assert tasks.score(sample, f" {answer.lower()}.") == 100
        assert tasks.score(sample, f" {answer}, {' '.join(w for w in LABELS['qa5'] if w in asked)}") == 100
        wrong = next(word for word in LABELS["qa5"] if word not in asked and word != answer)
        assert tasks.score(sample, f" {answer} and {wrong}.") == 0


def test_bad_input(tasks):
    with pytest.raises(ValueError, match="length = 100: babilong_gen_qa1 takes at least"):
        tasks.sample("babilong_gen_qa1", 100, 0)
    with pytest.raises(ValueError, match="nearest: babilong_gen_qa1"):
        tasks.sample("babilong_qa1", 2048, 0)
