"""Flags of commands: parsers whose errors are one line, and flags out of options classes. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from plait.fields import suggest

BAD_USAGE = 2
"""exit code"""


class Parser(ArgumentParser):
    """Errors are one line, what is wrong and where help is; a flag's help tells its default."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        default, about = options.get("default"), options.get("help") or ""
        if names[0].startswith("--") and "default" in options and "default:" not in about and default not in (None, ()):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            options["help"] = f"{about} (default: {shown})"
        return super().add_argument(*names, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        words = " ".join(str(message).split())
        words = re.sub(r"^Parser key \"?(\S+?)\"?: ", lambda m: f"--{m[1].replace('_', '-')}: ", words)
        several = r"Does not validate against any of the Union.*?Expected an? <class '(\w+)'>.*Given value: (.*)"
        words = re.sub(several, r"it must be \1; got \2", words)  # a number, or nothing
        words = re.sub(r"Expected an? <class '(\w+)'>\.", r"it must be \1;", words)
        words = re.sub(r"Expected a typing\.Literal\[(.*?)\]\.", r"it must be one of \1;", words)
        words = words.replace("Got value:", "got").rstrip(".")
        words = re.sub(
            r"^(Problems parsing config|Unexpected config): ", "--config: it must be JSON or YAML of options; ", words
        )
        if found := re.fullmatch(r"Option '(\S+)' is not accepted", words):  # of a file
            known = [name.removeprefix("--").replace("-", "_") for name in self._option_string_actions]
            near = get_close_matches(found[1], known, 1)
            words = f"--config: unknown field {found[1]!r}" + (f"; nearest: {near[0]}" if near else "")
        print(f"{self.prog}: {words} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(BAD_USAGE)


def make_parser(command: str, about: str, example: str, needed: str = "") -> Parser:
    """needed: what the usage line shows before [options]."""
    usage = " ".join(["plait", command, *needed.split(), "[options]"])
    return Parser(
        prog=f"plait {command}",
        usage=usage,
        description=about,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_options(parser: Parser, cls: type, skip: Sequence[str] = (), **shown: Any) -> None:
    """A flag for every field of an options class; help comes from its docstring and those of its
    bases. `shown` are defaults to tell where the flag itself, not given, stays None."""
    about: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        described = inspect.cleandoc(base.__dict__.get("__doc__") or "").split("Args:")[-1]
        found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", described, re.MULTILINE)
        about |= {name: " ".join(text.split()) for name, text in found}
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.name in skip:
            continue
        kind: Any = hints[f.name]
        options: dict[str, Any] = {"help": about.get(f.name), "default": f.default}
        if f.name in shown:
            options["help"] += f" (default: {shown[f.name]})"
        if "tuple[" in str(kind):
            options |= {"type": several(str if "str" in str(kind) else int if "int" in str(kind) else float)}
        elif "Path" in str(kind):
            options |= {"type": str}
        else:
            options |= {"type": kind}
        parser.add_argument(f"--{f.name.replace('_', '-')}", **options)


def config_first(arguments: Sequence[str]) -> list[str]:
    """Arguments with --config before the others, which override it wherever they stand."""
    front, rest, left = [], [], iter(arguments)
    for argument in left:
        if argument == "--config":
            front += [argument, *([value] if (value := next(left, None)) is not None else [])]
        else:
            (front if argument.startswith("--config=") else rest).append(argument)
    return front + rest


def several(kind: type) -> Callable[[Any], Any]:
    """A flag's type: values with commas between, or a list in a config file."""

    def values_of(value: Any) -> Any:
        if value is None or isinstance(value, tuple):
            return value
        parts = value.split(",") if isinstance(value, str) else value
        try:
            return tuple(kind(part) for part in parts)
        except (TypeError, ValueError):
            raise ValueError(f"{value!r}; it must be numbers with commas between, as 16,192") from None

    return values_of


def gather(cls: type, values: Namespace) -> dict[str, Any]:
    """The fields of an options class out of parsed flags."""
    return {
        f.name: list(value) if isinstance(value, tuple) else value
        for f in dataclasses.fields(cls)
        if hasattr(values, f.name)
        for value in [getattr(values, f.name)]
    }


def device_of(name: str) -> str:
    """A device of torch by --device, where this machine has it."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device = {name!r}; it must be cpu, cuda or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {name!r}; this machine has no GPU that torch can use; give cpu or auto")
    return name


def dtype_of(name: str, device: str) -> Any:
    """A dtype of torch by --dtype."""
    import torch

    names = ("float32", "bfloat16", "float16", "float64")
    if name == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if name not in names:
        raise ValueError(f"dtype = {name!r}; {suggest(name, ('auto', *names))}")
    return getattr(torch, name)
