"""Tells on stderr what a run is doing. The table of its figures comes at the end."""

from __future__ import annotations

import sys
import time

_BEGAN = time.monotonic()


def tell(text: str) -> None:
    """Print a line with the seconds since the run began."""
    print(f"{time.monotonic() - _BEGAN:5.0f}s {text}", file=sys.stderr, flush=True)
