"""Tells whether code runs because a module is imported."""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import Any

_machinery: Any = getattr(importlib, "_bootstrap", None)
_FILE = "<frozen importlib._bootstrap>"
#: One lock for each module that any thread imports at the moment. It is empty as a rule, and so
#: saves a look at the frames. If a Python has no such dict, the frames are looked at each time.
_module_locks: Any = getattr(_machinery, "_module_locks", (None,))


def count_imports_under_way() -> int:
    """Return a number that grows while the current thread imports a module, and is 0 if it imports
    none.

    It is the number of frames of Python's import system on the thread's stack.
    """
    if not _module_locks:
        return 0
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code.co_filename == _FILE
        frame = frame.f_back
    return count
