"""Check that two servers replicate from each other, and that nothing makes this unsafe.

Each operation on a pair begins with :func:`require_sound`. Nothing is changed. A problem is a
sentence without a full stop that also names the remedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from django.db import Error

from sharded_orm import runtime
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.pairs.pair_servers import PairServers, open_pair
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

# The number of tables that a problem names.
_NAMED: Final = 3
# If the tables of two servers differ, the reason may be that one has not executed all changes of
# the other yet. Wait for this number of seconds at most, and compare the tables again.
_CHANGE: Final = 10.0
# A query that waits until a server has executed changes ends after this number of seconds. For a
# longer wait, the query is repeated.
_SLICE: Final = 1.0
# Seconds between two checks whether a server is connected to the other.
_POLL: Final = 0.05


def check(first: str, second: str, *, keeps_for_later: str = "") -> list[str]:
    """Return sentences about everything that is wrong with a pair; an empty list if nothing is.

    :param keeps_for_later: during a rolling upgrade, the node that receives changes but does not
        execute them. The two sides may then have different columns. "" if there is no such node.

    Cost: about ten round trips to each server, one query per server for the columns of all tables,
    and a login with the application's account.
    """
    try:
        with open_pair(first, second) as servers:
            problems = list(server_problems(servers)) or list(epoch_problems(servers))
            if not problems:
                problems += link_problems(servers, keeps_for_later)
                problems += content_problems(servers, is_upgrade=bool(keeps_for_later))
    except PairRefused as exc:
        return list(exc.problems)
    return problems


def require_sound(first: str, second: str) -> None:
    """Refuse to go on if anything is wrong with a pair; see :func:`check`.

    :raises PairRefused: something is wrong. The message lists all problems.
    """
    if problems := check(first, second):
        raise PairRefused(problems)


def server_problems(servers: PairServers) -> Iterator[str]:
    """Yield reasons why replication between the two servers would not be safe.

    Only settings and privileges are checked, and not whether the servers replicate at present.
    """
    first, second = servers.both
    schemas = [shard.schema for shard in servers.shards]
    for side in servers.both:
        if not side.status().can_be_promoted:
            yield from side.server_problems()
            continue
        if lacking := list(side.operator_problems(schemas)):
            # Do not check the settings of the server: without these privileges, the operator's
            # account cannot read them.
            yield from lacking
        else:
            yield from side.server_problems()
        yield from _application_problems(side.name, servers)
    if all(side.status().can_be_promoted for side in servers.both):
        yield from second.identity_problems(first)


def _application_problems(name: str, servers: PairServers) -> Iterator[str]:
    node = runtime.topology().nodes[name]
    account = f"the application's account {node.get('USER')!r}"
    kind = type(servers.first)
    try:
        with kind(name, node) as application:
            yield from application.application_problems(account)
    except Error as exc:
        yield kind.why_no_session(name, account, exc)


def epoch_problems(servers: PairServers) -> Iterator[str]:
    """Yield a problem for a side with an old epoch, and for a side with a newer epoch than the
    topology.

    An epoch is a number of a shard that grows each time one of its sides is given up. A side with
    an old epoch was given up, and has not rejoined the pair.
    """
    for side in servers.both:
        if schemas := given_up_schemas(side, servers.shards):
            yield (
                f"{side.name!r} was given up ('shards switch --force'), and its rows of"
                f" {', '.join(schemas[:_NAMED])} may not be those of the other side: run"
                f" 'manage.py pairs rejoin {side.name}'"
            )
        yield from newer_epoch_problems(side, servers.shards)


def newer_epoch_problems(side: MySQLPairSide, shards: Iterable[Shard]) -> Iterator[str]:
    """Yield a problem if ``side`` has a later epoch than the topology. One query.

    This means that a side was given up, and somebody has then published an older topology again. In
    that older topology, the given-up side may still be the active one.
    """
    shards = list(shards)
    newer = _newer_schemas(side, shards)
    if newer:
        # The topology in the memory of this process may be outdated: it may be from before the
        # switch that gave the side its epoch. So read the topology again.
        runtime.refresh()
        newer = _newer_schemas(side, shards)
    if newer:
        yield (
            f"{side.name!r} has a later epoch of {', '.join(newer[:_NAMED])} than the topology, which is older"
            " than the last 'shards switch --force', and names the side active that was given up: somebody"
            " has published or restored it. Publish the topology that was in use ('manage.py topology"
            " history', 'rollback')"
        )


def _newer_schemas(side: MySQLPairSide, shards: Iterable[Shard]) -> list[str]:
    epochs = _epochs(side, shards).items()
    return [schema for schema, (own, published) in epochs if own > published]


def given_up_schemas(side: MySQLPairSide, shards: Iterable[Shard]) -> list[str]:
    """Return the schemas of ``shards`` for which ``side`` was given up. One query.

    For these shards, the epoch on ``side`` is older than the epoch in the topology.
    """
    epochs = _epochs(side, shards).items()
    return [schema for schema, (own, published) in epochs if own < published]


def _epochs(side: MySQLPairSide, shards: Iterable[Shard]) -> dict[str, tuple[int, int]]:
    """Return a dict that maps each schema to (epoch on ``side``, epoch in the topology)."""
    groups = runtime.topology().groups
    published = {s.schema: groups[s.group].range_of(s.number).epoch for s in shards}
    stored = side.epochs(list(published))
    return {schema: (stored.get(schema, 0), epoch) for schema, epoch in published.items()}


def link_problems(servers: PairServers, keeps_for_later: str = "") -> Iterator[str]:
    """Yield reasons why one of the servers does not receive or execute all changes of the other.

    :param keeps_for_later: the node that may receive changes without executing them.
    """
    return chain.from_iterable(
        replica.follow_problems(source, keeps_for_later=replica.name == keeps_for_later)
        for replica, source in servers.directions
    )


def await_events(
    replica: MySQLPairSide,
    source: MySQLPairSide,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until ``replica`` replicates and has executed the present changes of ``source``.

    These are the changes that ``source`` itself has written until now. Changes that it has received
    from another server do not count.

    :param check: called before each second of the wait. It raises an error if the wait must end.
    :raises PairRefused: replication fails, or the wait takes more than ``seconds``.
    """
    position, deadline = source.written(), time.monotonic() + seconds
    while True:
        has_all = not position or replica.wait_for(position, _SLICE)
        if has_all and replica.follows(source):
            return
        check()
        if time.monotonic() > deadline or any(link.error for link in replica.links()):
            raise PairRefused(
                list(replica.follow_problems(source))
                or [
                    f"{replica.name!r} has not executed everything of {source.name!r} within"
                    f" {seconds:g} s: wait, or give a longer --timeout, and run the command again"
                ]
            )
        if has_all:
            time.sleep(_POLL)


def content_problems(servers: PairServers, *, is_upgrade: bool = False) -> Iterator[str]:
    """Yield triggers and events that must not be on a passive side, and tables that differ.

    :param is_upgrade: True during a rolling upgrade, when only one side has the new schema. Then
        tables may differ, and are not compared.
    """
    for side in servers.both:
        yield from side.foreign_objects(servers.passive_schemas(side))
    if is_upgrade:
        return
    first, second = servers.both
    if not _different_tables(servers):
        return
    # A change of a table may have been executed on one side only until now. So wait, and compare
    # again.
    for replica, source in servers.directions:
        if not replica.wait_for(source.written(), _CHANGE):
            yield (
                f"{replica.name!r} has not executed everything of {source.name!r}, and has other columns: wait,"
                " or mend the replication, and run the command again"
            )
            return
    if different := _different_tables(servers):
        more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
        yield (
            f"{', '.join(different[:_NAMED])}{more} have not the same columns in the same order on"
            f" {first.name!r} and {second.name!r}, and replication matches columns by their position:"
            f" finish what was begun ('manage.py migrate_shards --rolling'), or make one side anew from"
            " the other"
        )


def _different_tables(servers: PairServers) -> list[str]:
    """Return the tables whose columns differ between the servers. One query for each server."""
    first, second = servers.both
    schemas = [shard.schema for shard in servers.shards]
    here, there = first.columns(schemas), second.columns(schemas)
    return [
        f"{schema}.{table}"
        for schema in schemas
        for table in sorted({*here.get(schema, ()), *there.get(schema, ())})
        if here.get(schema, {}).get(table) != there.get(schema, {}).get(table)
    ]
