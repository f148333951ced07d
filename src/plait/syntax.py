"""Layout strings -> nodes that know their place in the string. No torch.

layout := item { " " item }          item := [N "*"] atom
atom   := mixer | "(" layout ")" | "heads(" part ", " part { ", " part } ")" [ opts ]
        | "mix(" mixer " + " mixer { " + " mixer } ")" [ opts ]
part   := share ":" mixer            mixer := name [ opts ]        opts := "[" key=value { ", " key=value } "]"

Whitespace is free between words, and separates the items of a layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from plait.config import Gdn, Gla, Kda, Lightning, Mamba2, Softmax
from plait.fields import show, suggest

NAMES: dict[str, type] = {
    "full": Softmax,
    "nope": Softmax,
    "swa": Softmax,
    "gla": Gla,
    "gdn": Gdn,
    "kda": Kda,
    "mamba2": Mamba2,
    "lightning": Lightning,
}
ALIASES = {"window": "window_size"}
"""short keys of layout strings"""
SHORT = {field: key for key, field in ALIASES.items()}
MAX_DEPTH = 20
"""of groups in groups"""


class LayoutError(ValueError):
    """A layout string that cannot be read; `position` counts characters from 0."""

    def __init__(self, message: str, position: int):
        super().__init__(f"layout, position {position}: {message}")
        self.position = position


@dataclass(frozen=True)
class Value:
    value: Any
    at: int
    """place of the value"""
    key_at: int = 0


@dataclass(frozen=True)
class Node:
    """A mixer with its options, or `heads` or `mix` with the mixers they hold."""

    name: str
    at: int
    options: dict[str, Value]
    children: tuple[Node, ...] = ()
    shares: tuple[int, ...] = ()


class Parser:
    word = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
    integer = re.compile(r"[0-9]{1,9}")
    value = re.compile(r"[^\s,\]\[]+")

    def __init__(self, text: str, num_layers: int):
        self.text, self.at, self.num_layers, self.depth = text, 0, num_layers, 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise LayoutError(message, self.at if at is None else at)

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def found(self) -> str:
        return f"found {self.peek()!r}" if self.peek() else "found the end"

    def spaces(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def take(self, pattern: re.Pattern) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def expect(self, char: str, context: str) -> None:
        self.spaces()
        if self.peek() != char:
            self.fail(f"{self.found()}; {context} needs {char!r} here")
        self.at += 1

    def layout(self, closing: str) -> list[Node]:
        start, nodes = self.at, []
        while True:
            self.spaces()
            if self.peek() == closing:
                if not nodes:
                    self.fail("the layout is empty; name at least one mixer")
                return nodes
            if not self.peek():
                self.fail(f"found the end; the group that starts at position {start - 1} needs {closing!r}")
            nodes += self.item()
            if self.peek() and self.peek() != closing and not self.peek().isspace():
                self.fail(f"{self.found()}; a space separates the items of a layout")

    def item(self) -> list[Node]:
        start = self.at
        count = self.take(self.integer)
        if count is not None:
            self.expect("*", f"the count {count}")
            self.spaces()
            if int(count) < 1:
                self.fail("count 0; it must be at least 1", start)
        if self.peek() == "(":
            self.at, self.depth = self.at + 1, self.depth + 1
            if self.depth > MAX_DEPTH:
                self.fail(f"groups nest more than {MAX_DEPTH} deep")
            nodes = self.layout(")")
            self.at, self.depth = self.at + 1, self.depth - 1
        else:
            nodes = [self.atom()]
        total = len(nodes) * int(count or 1)
        if total > self.num_layers:
            self.fail(f"{total} layers; the model has num_layers = {self.num_layers}", start)
        return nodes * int(count or 1)

    def atom(self) -> Node:
        start = self.at
        name = self.take(self.word)
        if name is None:
            self.fail(f"{self.found()}; a mixer belongs here; {suggest(self.peek(), [*NAMES, 'heads', 'mix'])}")
        if name == "heads":
            return self.heads(start)
        if name == "mix":
            return self.mix(start)
        return self.mixer(name, start, [*NAMES, "heads", "mix"])

    def mixer(self, name: str | None, at: int, allowed: list[str]) -> Node:
        if name is None:
            self.fail(f"{self.found()}; a mixer belongs here; {suggest(self.peek(), allowed)}")
        if name not in NAMES:
            nested = " (heads and mix do not nest)" if name in ("heads", "mix") else ""
            self.fail(f"unknown mixer {show(name)}{nested}; {suggest(name, allowed)}", at)
        return Node(name, at, self.options())

    def heads(self, start: int) -> Node:
        self.expect("(", "heads")
        children, shares = [], []
        while True:
            self.spaces()
            share = self.take(self.integer)
            if share is None:
                self.fail(f"{self.found()}; a part of heads(...) starts with its share, as 3:gdn")
            if int(share) < 1:
                self.fail("share 0; it must be at least 1", self.at - len(share))
            self.expect(":", f"the share {share}")
            self.spaces()
            at = self.at
            children.append(self.mixer(self.take(self.word), at, list(NAMES)))
            shares.append(int(share))
            self.spaces()
            if self.peek() != ",":
                break
            self.at += 1
        self.expect(")", "heads")
        if len(children) < 2:
            self.fail("heads takes two or more parts", start)
        return Node("heads", start, self.options(), tuple(children), tuple(shares))

    def mix(self, start: int) -> Node:
        self.expect("(", "mix")
        children = []
        while True:
            self.spaces()
            at = self.at
            children.append(self.mixer(self.take(self.word), at, list(NAMES)))
            self.spaces()
            if self.peek() != "+":
                break
            self.at += 1
        self.expect(")", "mix")
        if len(children) < 2:
            self.fail("mix takes two or more mixers", start)
        return Node("mix", start, self.options(), tuple(children))

    def options(self) -> dict[str, Value]:
        before = self.at
        self.spaces()
        if self.peek() != "[":
            self.at = before
            return {}
        self.at += 1
        options: dict[str, Value] = {}
        while True:
            self.spaces()
            start = self.at
            key = self.take(self.word)
            if key is None:
                self.fail(f"{self.found()}; an option is written key=value")
            if ALIASES.get(key, key) in [ALIASES.get(word, word) for word in options]:
                self.fail(f"key {show(key)} is given twice", start)
            self.expect("=", f"the key {show(key)}")
            self.spaces()
            at = self.at
            text = self.take(self.value)
            if text is None:
                self.fail(f"{self.found()}; {show(key)} needs a value")
            options[key] = Value(_literal(text), at, start)
            self.spaces()
            if self.peek() != ",":
                break
            self.at += 1
        self.expect("]", "a list of options")
        return options


def _literal(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[lowered]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
