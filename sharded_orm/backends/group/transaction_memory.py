"""Remembers, for each transaction, which moves of keys between shards were known when it began.

If a key moves to another shard while a transaction is open, the transaction may miss the key's rows
or see them twice. To notice that, upper layers compare the moves that were known at its beginning
with later ones. Only upper layers know keys and moves, so the package's Django app provides the
function that returns what they know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm.topology.model import Shard

_knowledge: Callable[[Shard], Any] | None = None


def provide_knowledge(knowledge: Callable[[Shard], Any]) -> None:
    """Set the function that :func:`knowledge_of` calls. The package's Django app does so."""
    global _knowledge
    _knowledge = knowledge


def knowledge_of(shard: Shard) -> Any:
    """Return what the upper layers know now about keys that move between the shards of the group.
    None if the group does not move keys, or if the moves are unknown.

    Called before the first statement of each transaction on ``shard``.
    """
    return None if _knowledge is None else _knowledge(shard)
