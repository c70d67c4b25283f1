"""A time limit for foreign Python code that runs in a thread and cannot be asked to stop.

Owns the one use of CPython's asynchronous exceptions. Invariant: the exception reaches no code but the function given
to `within`, since it is only sent while that function runs, under the lock that ends the run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TimeLimitError(Exception):
    """The function ran longer than it may."""


class _Interrupt(BaseException):
    """Not an Exception, so that the interrupted code does not catch it by habit."""


def within(limit_s: float, function: Callable[[], Result]) -> Result:
    """Run `function` here; TimeLimitError after `limit_s` seconds of it, at its next bytecode."""
    run = _Run(threading.get_ident())
    timer = threading.Timer(limit_s, run.interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return function()
        finally:
            run.end()
            timer.cancel()
    except _Interrupt:
        run.end()
        timer.cancel()
        raise TimeLimitError(f"longer than {limit_s:g} s") from None


class _Run:
    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._is_over = False

    def interrupt(self) -> None:
        with self._lock:
            if not self._is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Interrupt))

    def end(self) -> None:
        with self._lock:
            self._is_over = True
