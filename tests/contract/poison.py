"""Uninitialized memory made visible: while this is on, torch's `empty` functions return NaN (integers: 77)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

NAMES = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            with torch.no_grad():
                return x.fill_(float("nan") if x.is_floating_point() else 77)

        return made

    with contextlib.ExitStack() as stack:
        for owner, name in NAMES:
            stack.enter_context(mock.patch.object(owner, name, poison(getattr(owner, name))))
        yield
