"""The signals that the library sends."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import django
from django.db.models import Model
from django.dispatch import Signal

# Directories of the library and of Django. The call site of a query is the innermost stack frame
# whose file is in neither of these directories.
_INSIDE = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (__file__, django.__file__))


class ScatterSignal(Signal):
    """The signal that is sent before a query with ``scatter()`` is sent to more than one shard.

    Receivers get ``sender`` (the model), ``route`` (the query's shards) and ``call_site``
    (``"file:line"`` of the innermost stack frame that is not in the library or Django). A receiver
    that raises an exception stops the query. So a receiver can limit costs:
    ``if len(route.shards) > 64: raise``.
    """

    def announce(self, model: type[Model], route: object) -> None:
        # Find the call site only if the signal has a receiver, because walking the stack is expensive.
        if self.has_listeners(model):
            self.send(sender=model, route=route, call_site=_call_site())


def _call_site() -> str:
    frames: list[Any] = traceback.extract_stack()
    for frame in reversed(frames):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"


scattered = ScatterSignal()

#: The signal that reports what the cache has counted, such as hits. A process that uses the cache
#: sends it about every ten seconds, and after requests. Receivers get ``counts``: a dict of dicts,
#: such as ``{"gallery.Photo": {"object_hits": 3}}``, with the growth of each counter since the last
#: signal. For the counters' names see ``manage.py cache_stats``. An exception of a receiver is
#: logged and ignored.
cache_counted = Signal()
