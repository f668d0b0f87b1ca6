"""Find out, when a transaction begins, what upper layers know about keys that move between a
group's shards.

A key may move while a transaction is open, so a transaction remembers which moves were known at its
beginning. Only upper layers know keys and moves: the package's Django app provides the function
that returns them.
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
    """Return what the upper layers know about keys that move between the shards of the group; None if
    they know nothing.

    Called before the first statement of each transaction on ``shard``.
    """
    return None if _knowledge is None else _knowledge(shard)
