"""A small world of people, rooms and things, told in sentences as bAbI's tasks 1 to 5 are (Weston et al. 2015), and
questions on it. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
"""the people of task 5"""
MOVED = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
GOT = ("got", "grabbed", "picked up", "took")
DROPPED = ("dropped", "discarded", "left", "put down")
GAVE = ("gave", "handed", "passed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclass(frozen=True)
class Story:
    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass
class _World:
    """Who is where, who holds what, and where each thing has been; nothing is known before it is told."""

    rng: random.Random
    people: tuple[str, ...]
    facts: list[str] = field(default_factory=list)
    room: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    been: dict[str, list[str]] = field(default_factory=dict)
    """thing -> the rooms it has been in, one after the other"""
    given: list[tuple[str, str, str]] = field(default_factory=list)
    """giver, thing, receiver"""

    def move(self) -> None:
        who = self.rng.choice(self.people)
        where = self.rng.choice([room for room in ROOMS if room != self.room.get(who)])
        self.room[who] = where
        for thing in self.held_by(who):
            self.been[thing].append(where)
        self.facts.append(f"{who} {self.rng.choice(MOVED)} the {where}.")

    def get(self) -> None:
        free = [
            (who, thing)
            for who, room in self.room.items()
            for thing in THINGS
            if thing not in self.holder and self.been.get(thing, [room])[-1] == room
        ]
        if not free:
            return self.move()
        who, thing = self.rng.choice(free)
        self.holder[thing] = who
        self.been.setdefault(thing, [self.room[who]])
        there = self.rng.choice(("", " there"))
        self.facts.append(f"{who} {self.rng.choice(GOT)} the {thing}{there}.")
        return None

    def drop(self) -> None:
        if not self.holder:
            return self.get()
        thing = self.rng.choice(sorted(self.holder))
        who, there = self.holder.pop(thing), self.rng.choice(("", " there"))
        self.facts.append(f"{who} {self.rng.choice(DROPPED)} the {thing}{there}.")
        return None

    def give(self) -> None:
        able = [
            (who, thing, other)
            for thing, who in self.holder.items()
            for other in self.people
            if other != who and self.room.get(other) == self.room[who]
        ]
        if not able:
            return self.rng.choice((self.get, self.move))()
        self.given.append(self.rng.choice(able))
        who, thing, other = self.given[-1]
        self.holder[thing] = other
        self.facts.append(f"{who} {self.rng.choice(GAVE)} the {thing} to {other}.")
        return None

    def held_by(self, who: str) -> list[str]:
        return [thing for thing in THINGS if self.holder.get(thing) == who]

    def live(self, steps: int, *actions: Callable[[_World], None]) -> _World:
        for _ in range(steps):
            self.rng.choice(actions)(self)
        return self

    def told(self, question: str, answer: str) -> Story:
        return Story(tuple(self.facts), question, answer)


_WALK = (_World.move, _World.move, _World.get, _World.drop)


def qa1(rng: random.Random) -> Story:
    """Where a person is; two moves for each question of the story up to this one."""
    world = _World(rng, PEOPLE).live(2 * rng.randint(1, 5), _World.move)
    who = rng.choice(sorted(world.room))
    return world.told(f"Where is {who}?", world.room[who])


def qa2(rng: random.Random) -> Story:
    """Where a thing is that was carried or dropped."""
    while True:
        world = _World(rng, PEOPLE).live(rng.randint(4, 24), *_WALK)
        if world.been:
            thing = rng.choice(sorted(world.been))
            return world.told(f"Where is the {thing}?", world.been[thing][-1])


def qa3(rng: random.Random) -> Story:
    """Where a thing was before a room that it was in once."""
    while True:
        world = _World(rng, PEOPLE).live(rng.randint(8, 40), *_WALK)
        asked = [
            (thing, before, after)
            for thing, rooms in sorted(world.been.items())
            for before, after in zip(rooms, rooms[1:], strict=False)
            if rooms.count(after) == 1
        ]
        if asked:
            thing, before, after = rng.choice(asked)
            return world.told(f"Where was the {thing} before the {after}?", before)


def qa4(rng: random.Random) -> Story:
    """Three rooms in a line; what is on one side of the middle one."""
    first, middle, last = rng.sample(ROOMS, 3)
    way = rng.choice(sorted(OPPOSITE))
    facts = [_beside(rng, first, way, middle), _beside(rng, middle, way, last)]
    rng.shuffle(facts)
    asked, answer = rng.choice(
        [
            (f"What is {way} of the {middle}?", first),
            (f"What is {OPPOSITE[way]} of the {middle}?", last),
            (f"What is the {middle} {way} of?", last),
            (f"What is the {middle} {OPPOSITE[way]} of?", first),
        ]
    )
    return Story(tuple(facts), asked, answer)


def _beside(rng: random.Random, room: str, way: str, other: str) -> str:
    if rng.random() < 0.5:
        room, way, other = other, OPPOSITE[way], room
    return f"The {room} is {way} of the {other}."


def qa5(rng: random.Random) -> Story:
    """Who gave what to whom; only what has one answer in the whole story is asked."""
    while True:
        world = _World(rng, GIVERS).live(rng.randint(6, 24), _World.move, _World.get, _World.give, _World.give)
        asked: dict[str, set[str]] = {}
        for giver, thing, other in world.given:
            for question, answer in (
                (f"Who gave the {thing} to {other}?", giver),
                (f"Who gave the {thing}?", giver),
                (f"Who did {giver} give the {thing} to?", other),
                (f"Who received the {thing}?", other),
                (f"What did {giver} give to {other}?", thing),
            ):
                asked.setdefault(question, set()).add(answer)
        clear = sorted((question, *answers) for question, answers in asked.items() if len(answers) == 1)
        if clear:
            return world.told(*rng.choice(clear))


STORIES: Mapping[str, Callable[[random.Random], Story]] = {"qa1": qa1, "qa2": qa2, "qa3": qa3, "qa4": qa4, "qa5": qa5}
LABELS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS),
    "qa5": (*GIVERS, *THINGS),
}
"""the words that answers of a task are among"""
