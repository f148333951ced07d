"""Processes that work through jobs; results come in the order of the jobs. No torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

NO_MEMORY = (
    "a process was ended or ran out of memory; the same command goes on from here: give it fewer --processes,"
    " a smaller --shard-bytes, or cut the largest documents"
)
_work: Callable[..., Any] | None = None


class Pool:
    """At most one job more than there are processes is held; one process works in this one."""

    def __init__(self, work: Callable[..., Any], processes: int):
        self.work, self.processes = work, processes
        self.waiting: deque[tuple[Any, Any]] = deque()
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        if self.processes > 1:  # spawned: forked processes of one parent keep each other alive when it is killed
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.processes, context, _start, (self.work,))
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def put(self, tag: Any, result: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
        """Take on a job, or its result where there is one already (not None); gives (tag, result) of jobs before."""
        if result is None:
            result = in_memory(self.pool.submit, _do, *arguments) if self.pool else in_memory(self.work, *arguments)
        self.waiting.append((tag, result))
        while len(self.waiting) > self.processes or (self.waiting and _is_done(self.waiting[0][1])):
            yield self._next()

    def rest(self) -> Iterator[tuple[Any, Any]]:
        while self.waiting:
            yield self._next()

    def _next(self) -> tuple[Any, Any]:
        tag, result = self.waiting.popleft()
        return tag, in_memory(result.result) if isinstance(result, Future) else result


def in_memory(work: Callable[..., Any], *arguments: Any) -> Any:
    """ValueError in one line where memory does not suffice."""
    try:
        return work(*arguments)
    except (MemoryError, BrokenProcessPool):
        raise ValueError(NO_MEMORY) from None


def _is_done(result: Any) -> bool:
    return not isinstance(result, Future) or result.done()


def _start(work: Callable[..., Any]) -> None:
    """In a new process: remember what to do, leave Ctrl-C to the parent, and end with it, however it ends."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _do(*arguments: Any) -> Any:
    assert _work is not None
    return _work(*arguments)
