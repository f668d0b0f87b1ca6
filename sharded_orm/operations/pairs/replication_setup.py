"""Start the replication of two servers in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from sharded_orm import runtime
from sharded_orm.operations.exceptions import JournalMissing, PairRefused
from sharded_orm.operations.pairs import replication_check
from sharded_orm.operations.pairs.pair_servers import PairServers, open_pair
from sharded_orm.operations.pairs.upgrade_state import unfinished

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

#: The default number of seconds in which each server must execute the changes that it does not have
#: yet.
TIMEOUT = 60.0


def set_up(
    first: str,
    second: str,
    *,
    timeout: float = TIMEOUT,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Make two nodes replicate from each other.

    The second node must be empty, or a copy of the first node, such as a replica. On a copy,
    ``gtid_slave_pos`` must be the position in the log of the first node up to which the copy has
    all changes. If one of the nodes already replicates from the other, this replication stays as it
    is, and only the opposite one is started. After an interruption, call this again.

    :param timeout: seconds in which each server must execute the changes of the other that it does
        not have yet.
    :param tell: called after each step with a line for the operator.
    :raises PairRefused: the servers cannot be a pair, or replication does not run. The message
        lists all reasons. If they are about settings of the servers, nothing was changed.
    """
    with suppress(JournalMissing):  # A new site may have none yet.
        if upgrade := unfinished(first, second):
            raise PairRefused([upgrade])
    with open_pair(first, second) as servers:
        problems = list(replication_check.server_problems(servers))
        if not problems:
            problems = list(replication_check.epoch_problems(servers))
        if not problems:
            problems = [p for pair in servers.directions for p in _unrelated(servers, *pair)]
        if problems:
            raise PairRefused(dict.fromkeys(problems))
        for replica, source in servers.directions:
            if replica.links():
                tell(f"{replica.name} replicates from {source.name} already")
            else:
                follow(replica, source)
                tell(f"{replica.name} replicates from {source.name}")
            replication_check.await_events(replica, source, timeout)
    replication_check.require_sound(first, second)


def _unrelated(servers: PairServers, replica: MySQLPairSide, source: MySQLPairSide) -> list[str]:
    """Return reasons why ``replica`` must not start to replicate from ``source``.

    If it replicates from ``source`` already, return the problems of this replication.
    """
    if replica.links():
        return list(replica.follow_problems(source))
    problems: list[str] = []
    problems += account_problems(source)
    written = source.written()
    schemas = [shard.schema for shard in servers.shards]
    has_tables = bool(replica.columns(schemas))
    if written and has_tables and not replica.knows_events_of(source):
        problems.append(
            f"{replica.name!r} has tables of shards, and no position in the log of {source.name!r}: it"
            f" cannot be known which rows it lacks. Make it anew from a copy of {source.name!r}, and"
            " SET GLOBAL gtid_slave_pos to the position of the copy"
        )
    return problems


def follow(replica: MySQLPairSide, source: MySQLPairSide) -> None:
    """Make ``replica`` start to replicate from ``source``.

    ``replica`` logs in to ``source`` with the account ``REPLICATION``, which is in the settings of
    the node ``source``.
    """
    account = account_of(source)
    assert account is not None, "_unrelated() has checked this"
    replica.follow(source, runtime.topology().nodes[source.name], account)


def account_problems(side: MySQLPairSide) -> Iterator[str]:
    """Yield a problem if the settings of ``side`` have no account with which the other side can
    replicate.
    """
    if account_of(side) is None:
        yield (
            f'node {side.name!r} has no REPLICATION: give it "REPLICATION": {{"USER": …, "PASSWORD":'
            " …}, the account with which the other side reads its log (GRANT REPLICATION SLAVE ON *.*)"
        )


def account_of(side: MySQLPairSide) -> dict[str, str] | None:
    """Return the account with which the other side reads the log of ``side``; None if there is
    none.
    """
    account: dict[str, str] | None = runtime.topology().nodes[side.name].get("REPLICATION")
    return account
