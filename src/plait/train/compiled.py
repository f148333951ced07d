"""torch.compile for training, a block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._dynamo

from plait.model.lm import LM

FORMS = 64
"""compiled forms of a block's code that may exist: one for each kind of layer, length, number of rows and set of frozen
parameters. Past dynamo's own 8, what is new would run uncompiled"""


def compile_blocks(model: LM) -> None:
    """Compile every block on its own; whatever calls one in a new shape waits for a form of its own.

    By blocks, since layers that are alike share a form, embedding and head gain nothing, and recomputation and FSDP
    work between blocks. Lengths are constants: code for any length takes longer to make, and to run.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
    for block in model.blocks:
        block.compile(dynamic=False)


@contextlib.contextmanager
def compiled(model: LM) -> Iterator[None]:
    """Within it the model's blocks are compiled."""
    compile_blocks(model)
    try:
        yield
    finally:
        for block in model.blocks:
            block._compiled_call_impl = None  # what Module.compile sets; it has no opposite


def eager() -> contextlib.AbstractContextManager:
    """Within it, compiled blocks run as they are written: measurements have shapes of their own, and hook the taps."""
    return torch.compiler.set_stance("force_eager")
