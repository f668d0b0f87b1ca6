"""Find shards that would make ids that belong to another shard.

Ids contain the number of their shard. If somebody has copied the schema of another shard, the copy
has the functions and counters of that shard. Then both shards may make the same id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.models.after_migrate.auto_increment import counted_ids
from sharded_orm.models.after_migrate.postgresql_defaults import layouts, tables
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class ForeignIDs:
    """A database function or a counter on ``shard`` that makes ids of another shard.

    :param source: the name of the function, or of the table that has the counter.
    :param problem: a sentence that describes the problem.
    :param remedy: a sentence that says what to do.
    """

    shard: Shard
    source: str
    problem: str
    remedy: str


def foreign_ids(shard: Shard, snapshot: SchemaSnapshot) -> Iterator[ForeignIDs]:
    """Yield the functions and counters on ``shard`` that make ids of another shard. Sends no query.

    :param snapshot: the schema of ``shard``.
    """
    migrate = f"'manage.py migrate --database {shard.alias}'"
    own_functions = layouts()
    for name, number in snapshot.shard_numbers.items():
        if name in own_functions and number != shard.number:
            yield ForeignIDs(
                shard,
                name,
                f"Function {name!r} on {shard.alias!r} makes ids of shard {number}, so the schema was"
                " copied from another shard. An id that other programs insert may exist twice.",
                f"{migrate} gives the function the number {shard.number}.",
            )
    # On PostgreSQL, a table with timestamped ids has an SQL sequence for these ids. If the table
    # has packed ids as well, its counter in ``snapshot`` may belong to that sequence. Then the
    # counter does not show the next packed id. So skip such a table.
    timestamped = tables() if snapshot.shard_numbers else set()
    for table, ids in counted_ids(shard).items():
        following = snapshot.counters.get(table)
        # If all ids of the shard are used up, ``following`` is ids.stop, which is one above the
        # last id. So accept this number, too.
        if following is None or ids.start <= following <= ids.stop or table in timestamped:
            continue
        yield ForeignIDs(
            shard,
            table,
            f"The next id of {table!r} on {shard.alias!r} is {following}, and its ids are {ids.start} to"
            f" {ids[-1]}, so the table was copied from another shard, or made without its first id. An"
            " id that other programs insert may exist twice.",
            f"{migrate} sets the counter."
            if following < ids.start
            else "Remove rows with ids of other shards, and set the counter to the highest own id + 1,"
            f" or to {ids.start} if there is none ('manage.py shards sql {shard.alias}').",
        )
