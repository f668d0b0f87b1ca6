"""A progress bar if tqdm is installed, otherwise a line per tenth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(total: int, stream: Any) -> Iterator[Callable[[int], None]]:
    """Show on ``stream`` how much of ``total`` is done; yield a function to call with each step."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield _lines(total, stream)
        return
    with tqdm(total=total, unit=" rows", file=stream, unit_scale=False) as bar:
        yield bar.update


def _lines(total: int, stream: Any) -> Callable[[int], None]:
    done = 0

    def update(step: int) -> None:
        nonlocal done
        before, done = done, done + step
        if done * 10 // total > before * 10 // total:
            stream.write(f"{done * 100 // total:3d} % ({done:,} of {total:,} rows)\n")

    return update
