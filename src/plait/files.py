"""Files that are complete or absent: written under another name beside their place, then renamed into it. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # bad text, bad JSON, a number or a nesting past Python's limits
        raise ValueError(f"{path}: not valid JSON ({error})") from None


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which takes the name `path` when the block ends well and vanishes when it does not.

    An old directory of that name stays until the new one is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (path.with_name(f".{path.name}.{end}") for end in ("partial", "old"))
    if old.exists() and not path.exists():  # a crash between the two renames below
        old.rename(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def claim(directory: Path, what: str = "run", doing: str = "using") -> Iterator[None]:
    """Own a directory until the block ends or the process dies; ValueError where another process does."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{what} {directory}: another process is {doing} it") from None
        yield
