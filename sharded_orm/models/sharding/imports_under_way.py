"""Finds out whether the current code runs because a module is being imported."""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import Any

_machinery: Any = getattr(importlib, "_bootstrap", None)
_FILE = "<frozen importlib._bootstrap>"
#: Python's dict with a lock for each module that is being imported, by any thread. It is usually
#: empty, and then nothing is being imported. A Python without this dict gets a tuple that is never
#: empty, so that count_imports_under_way() always examines the stack of the thread.
_module_locks: Any = getattr(_machinery, "_module_locks", (None,))


def count_imports_under_way() -> int:
    """Return how deeply the current thread is inside imports; 0 if it is importing nothing.

    The result is the number of frames of Python's import system on the thread's stack.
    """
    if not _module_locks:
        return 0
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code.co_filename == _FILE
        frame = frame.f_back
    return count
