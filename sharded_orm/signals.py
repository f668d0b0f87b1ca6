"""Signals of the library."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import django
from django.db.models import Model
from django.dispatch import Signal

# Frames of the library and of Django are not where the query was written.
_INSIDE = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (__file__, django.__file__))


class ScatterSignal(Signal):
    """Sent before a query asks more than one shard because it may scatter.

    Receivers get ``sender`` (the model), ``route`` and ``call_site`` (``"file:line"`` of
    the first frame outside the library and Django). A receiver that raises stops the
    query, which makes it a budget: ``if len(route.shards) > 64: raise``.
    """

    def announce(self, model: type[Model], route: object) -> None:
        # Walking the stack is worth it only when somebody listens.
        if self.has_listeners(model):
            self.send(sender=model, route=route, call_site=_call_site())


def _call_site() -> str:
    frames: list[Any] = traceback.extract_stack()
    for frame in reversed(frames):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"


scattered = ScatterSignal()

#: Sent about every ten seconds by a process that uses the cache, and after requests. Receivers
#: get ``counts``: label of each model -> what was counted since the last time, by name (see
#: ``manage.py cache_stats``). What a receiver raises is logged, and nothing else.
cache_counted = Signal()
