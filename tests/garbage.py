"""The collector of garbage, which would look again and again at what a process keeps until its end."""

from __future__ import annotations

import gc

# By default, objects are looked at after 700 new ones. Compiling a few queries makes as many.
_THRESHOLDS = 50_000, 20, 50


def keep_all() -> None:
    """Exempt all objects that there are from collections, and have fewer collections from now on.

    A sixth of the processor time of most tests goes into these. Forks inherit both, and share the memory
    of the objects, to which a collection would write.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
