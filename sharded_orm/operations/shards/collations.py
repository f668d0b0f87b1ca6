"""Find shard key columns whose collation treats two different texts as equal, such as "a" and "A".

To this library, "a" and "A" are two different shard keys, and their rows may be on two shards. If
both keys are on one shard, a query for the key "a" would also return the rows of "A". See
:mod:`sharded_orm.models.text_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sharded_orm.models.text_keys import InexactKey, KeyColumn, describe_inexact, inexact_keys
from sharded_orm.operations.nodes import node_connection
from sharded_orm.topology.model import Shard


@dataclass
class InexactColumn:
    """A shard key column whose collation treats different keys as equal.

    :param what: the end of a sentence about the column, such as "has the collation …".
    :param remedy: what the operator has to do, in sentences.
    :param shards: the shards on which the column has this collation.
    """

    key: KeyColumn
    what: str
    remedy: str
    shards: list[Shard] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """A sentence that names the model, the column, the collation and the shards."""
        first = self.shards[0].alias
        number = len(self.shards)
        where = f"on {number} shards, {first!r} for one" if number > 1 else f"on {first!r}"
        return f"{describe_inexact(self.key, self.what)}: {where}."


def inexact_columns(inexact: Iterable[InexactKey]) -> list[InexactColumn]:
    """Merge the findings of all shards. Return one item for each column and collation.

    The item lists all shards on which the column has this collation.
    """
    columns: dict[tuple[str, str, str], InexactColumn] = {}
    for column_on_shard in inexact:
        column_key = (
            column_on_shard.key.table,
            column_on_shard.key.field.column,
            column_on_shard.what,
        )
        column = columns.setdefault(
            column_key,
            InexactColumn(column_on_shard.key, column_on_shard.what, column_on_shard.remedy),
        )
        column.shards.append(column_on_shard.shard)
    return list(columns.values())


def read(shards: Sequence[Shard]) -> list[InexactColumn]:
    """Return the shard key columns on ``shards`` whose collation treats different keys as equal.

    For each node and group, costs one query per 500 shards.

    :raises django.db.Error: a node does not answer.
    """
    by_node_and_group: dict[tuple[str, str], list[Shard]] = {}
    for shard in shards:
        by_node_and_group.setdefault((shard.node, shard.group), []).append(shard)
    inexact: list[InexactKey] = []
    for (node, _), members in by_node_and_group.items():
        with node_connection(node) as connection:
            inexact += inexact_keys(connection, members)
    return inexact_columns(inexact)
