"""What a field of a frozen config takes, and the errors that say so in one line. No torch."""

from __future__ import annotations

import difflib
import functools
import math
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints


def suggest(word: str, allowed: Iterable[str]) -> str:
    """'nearest: x; allowed: x, y, z', the tail of an error about an unknown word."""
    allowed = list(allowed)
    return nearest(word, allowed) + f"allowed: {', '.join(allowed)}"


def nearest(word: str, allowed: Iterable[str]) -> str:
    """'nearest: x; ', or nothing where no allowed word is near; upper and lower case are one."""
    words = {each.lower(): each for each in allowed}
    close = difflib.get_close_matches(word.lower(), words, n=3, cutoff=0.5)
    return f"nearest: {', '.join(words[each] for each in close)}; " if close else ""


def show(value: Any) -> str:
    """repr for an error message, cut to a length that stays readable."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


field_types = functools.cache(get_type_hints)
"""a config class -> the type of each field; cached, as building one takes longer than building a config"""


class FieldError(ValueError):
    """A field of a config with a value that it cannot take. `owner` is what the reader calls the config."""

    def __init__(self, owner: str, field: str, value: Any, allowed: str):
        super().__init__(f"{owner}: {field} = {show(value)}; it must be {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


def check(config: Any, ok: bool, field: str, allowed: str) -> None:
    if not ok:
        raise FieldError(config.kind, field, getattr(config, field), allowed)


def check_choice(config: Any, *fields: str) -> None:
    hints = field_types(type(config))
    for field in fields:
        try:
            fit(hints[field], getattr(config, field))
        except ValueError as error:
            raise FieldError(config.kind, field, getattr(config, field), str(error)) from None


def check_positive(config: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        check(config, 0 < value < math.inf, field, f"a {'finite ' if isinstance(value, float) else ''}number above 0")


def check_divides(config: Any, part: str, whole: str) -> None:
    size, total = getattr(config, part), getattr(config, whole)
    check(config, size > 0 and total % size == 0, part, f"a divisor of {whole} = {total}")


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a word",
    Path: "a path",
    type(None): "none",
}


def arms_of(hint: Any) -> tuple:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def fit(hint: Any, value: Any) -> Any:
    """A plain value as a field of this type takes it (whole numbers pass as floats); ValueError says what it takes."""
    words = []
    for arm in arms_of(hint):
        if get_origin(arm) is Literal:
            choices = get_args(arm)
            if value in choices:
                return value
            close = difflib.get_close_matches(str(value).lower(), choices)
            words.append(f"one of {', '.join(choices)}" + (f" (nearest: {', '.join(close)})" if close else ""))
        elif _is(arm, value):
            return float(value) if arm is float else value
        else:
            words.append(_WORDS[arm])
    raise ValueError(", or ".join(words))


def _is(arm: type, value: Any) -> bool:
    if arm is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # neither infinite nor NaN
    return type(value) is arm and (arm is not int or abs(value) < 2**53)
