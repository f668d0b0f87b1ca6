"""The operator's sessions on the sides of a pair, for the fences of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db.utils import load_backend

from sharded_orm import database_settings
from sharded_orm.backends.side_fence import SideFence
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard


@contextmanager
def open_fence(
    shard: Shard, confirm: Callable[[], None], *, answer_within: int | None = None
) -> Iterator[SideFence]:
    """A context manager that yields the fence of ``shard`` on the node ``shard.node``.

    A fence is the set of triggers that can make a side refuse writes. The session uses the account
    ``OPERATOR`` of the node.

    :param confirm: called before each change. It raises an error if this process must not make the
        change.
    :param answer_within: seconds in which the server must answer each statement; None for no limit.
    :raises django.db.Error: the server does not answer, or refuses the account.
    """
    settings = database_settings.shard_settings(shard)
    del settings["SHARD"]
    backend = load_backend(settings["ENGINE"])
    wrapper = backend.DatabaseWrapper(complete(settings), shard.alias)
    account = database_settings.operator_settings(shard.node)
    with wrapper.side_fence(confirm, account, answer_within) as fence:
        yield fence


def change_nothing() -> None:
    """Raise an error. Pass this function as ``confirm`` to a fence that must not be changed."""
    raise AssertionError("checks change nothing")
