"""Find misplaced rows: their shard key belongs to another shard, so no query finds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.apps import apps
from django.db import Error, connections
from django.db.models import Field

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.models.moves.scatter import MovingKeys
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.tables.directory import missing_table_remedy
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.shards.status import error_line
from sharded_orm.operations.shards.table_reads import TableRead, TableRows
from sharded_orm.topology.model import Shard

#: The search collects this number of shard keys from rows, and then looks up their shards together.
KEYS = 5000
#: For each table of each shard, a report shows at most this number of keys as examples.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class StrayKey:
    """A shard key that has rows on a wrong shard.

    :param home: the alias of the shard on which the rows belong; None if the key has no shard.
    :param why: why the key belongs there, or has no shard, as the group's strategy explains it.
    """

    key: Any
    home: str | None
    why: str


@dataclass
class Misplaced:
    """The misplaced rows in one table of one shard.

    :param shard: the shard that has the rows, although they belong to other shards or to none.
    :param model: the model's label.
    :param key_name: the name of the shard key's field.
    :param keys: number of different shard keys that the misplaced rows have.
    :param rows: number of misplaced rows. If only a sample was read, the number in the sample.
    :param examples: some of these shard keys, each with the shard on which it belongs.
    """

    shard: Shard
    model: str
    key_name: str
    keys: int = 0
    rows: int = 0
    examples: list[StrayKey] = field(default_factory=list)


@dataclass
class RowScan:
    """Searches for misplaced rows, and collects the results.

    Not thread-safe: give each thread its own instance, and merge the instances with :meth:`add`.

    :param sample: number of rows to read from each table of each shard, in the order of the primary
        key; None reads all rows. If the primary key is an integer, the sample begins at a random
        row; otherwise at the first row.
    :param looked_at: number of rows that were read so far.
    """

    sample: int | None
    looked_at: int = 0
    misplaced: list[Misplaced] = field(default_factory=list)
    #: Why rows could not be checked. If the rows of a shard could not be read, maps the alias of
    #: the shard to the reason. If the keys of a group could not be looked up, maps the name of the
    #: group to the reason.
    errors: dict[str, str] = field(default_factory=dict)

    def read(self, wrapper: Any, shards: Sequence[Shard], alive: Alive) -> None:
        """Check whether the rows on ``shards`` are on the shard of their key.

        Rows of keys that are moving, or have moved meanwhile, are not reported. All ``shards`` must
        be on one node and belong to one group.

        Cost for each model: one statement per 256 shards if only a sample is read. If all rows are
        read, and always on SQLite, one statement per shard. If the group has a directory, also one
        query per 500 keys. Memory: the keys of one batch.

        :param wrapper: a connection object of the node, for statements that name several shards.
        :param alive: called after each batch, to report that the node answers.
        """
        if not shards:
            return
        for options in sharded_models(shards[0].group):
            key = _key_field(options)
            one: Any = connections[shards[0].alias]
            counts = TableRows(options.model, one, self.sample).value_counts(key)
            read = TableRead(one, options.model, [key], counts)
            # Do not report the rows of a key that is moving: for a moment, they may be on two
            # shards.
            try:
                moving = MovingKeys(options.group)
            except Error as exc:
                self._record_failure(options.group, exc)
                return
            misplaced: dict[str, Misplaced] = {}
            batch: list[tuple[Shard, Any, int]] = []
            for shard, (value, count) in read.rows(
                wrapper, shards, self.errors, together=self.sample is not None
            ):
                # Strategies expect a key in the form that is sent to the database, so convert it.
                batch.append((shard, key.get_prep_value(value), count))
                if len(batch) >= KEYS:
                    self._check_rows(options, batch, misplaced, moving)
                    batch.clear()
                    alive()
            self._check_rows(options, batch, misplaced, moving)
            self.misplaced += misplaced.values()
            alive()

    def _record_failure(self, group: str, exc: Error) -> None:
        # The database of the directory has failed, not the node with the shards. So store the error
        # under the name of the group, and not under the alias of a shard.
        remedy = missing_table_remedy(exc, runtime.config().directory)
        # Remove the full stop of the remedy, because the text becomes a part of another sentence.
        text = remedy.removesuffix(".") or error_line(exc)
        self.errors[group] = f"its keys cannot be looked up ({text})"

    def add(self, other: RowScan) -> None:
        """Add the results in ``other``, a scan of another node, to this scan."""
        self.looked_at += other.looked_at
        self.misplaced += other.misplaced
        self.errors.update(other.errors)

    def _check_rows(
        self,
        options: ShardOptions,
        rows: Iterable[tuple[Shard, Any, int]],
        misplaced: dict[str, Misplaced],
        moving: MovingKeys,
    ) -> None:
        rows = list(rows)
        try:
            homes = _homes(options.group, {key for _, key, _ in rows})
            elsewhere = {key for shard, key, _ in rows if homes[key] != shard.number}
            elsewhere -= moving.among(elsewhere) if elsewhere else set()
        except Error as exc:
            self._record_failure(options.group, exc)
            return
        strays: dict[tuple[str, Any], tuple[Shard, int]] = {}
        for shard, key, count in rows:
            self.looked_at += count
            if key in elsewhere and homes[key] != shard.number:
                before = strays.get((shard.alias, key), (shard, 0))[1]
                strays[shard.alias, key] = (shard, before + count)
        for (alias, key), (shard, count) in strays.items():
            entry = misplaced.setdefault(
                alias, Misplaced(shard, options.model._meta.label, _key_field(options).name)
            )
            entry.keys += 1
            entry.rows += count
            if len(entry.examples) < EXAMPLES:
                entry.examples.append(_stray_key(options.group, key, homes[key]))


def sharded_models(group: str) -> list[ShardOptions]:
    """Return the models of ``group`` whose tables have a shard key column, sorted by label.

    Automatic many-to-many tables have no such column, so they are left out. They need no check: the
    foreign keys of their rows ensure that each row is on the shard of the rows that it connects.
    """
    models = []
    for model in apps.get_models():
        options = shard_options(model)
        meta = model._meta
        if options is not None and options.group == group and options.key is not None:
            # With multi-table inheritance, only the table of the parent model has the shard key, so
            # leave out the child model.
            is_own = options.key in meta.local_concrete_fields
            if meta.managed and not meta.proxy and is_own:
                models.append(options)
    return sorted(models, key=lambda options: options.model._meta.label)


def _key_field(options: ShardOptions) -> Field[Any, Any]:
    assert options.key is not None
    return options.key


def _homes(group: str, keys: set[Any]) -> dict[Any, int | None]:
    """Return a dict that maps each key to its shard's number, or to None if it has no shard."""
    strategy = runtime.strategy(group)
    try:
        return strategy.locate_many(keys)
    except InvalidShardKey:
        pass
    homes: dict[Any, int | None] = {}
    for key in keys:
        try:
            homes[key] = strategy.locate(key)
        except InvalidShardKey:
            homes[key] = None
    return homes


def _stray_key(group: str, key: Any, home: int | None) -> StrayKey:
    try:
        why = runtime.strategy(group).explain(key)
    except InvalidShardKey as exc:
        why = str(exc)
    exists = home is not None and home in runtime.group(group)
    return StrayKey(
        key, runtime.shard(group, home).alias if exists and home is not None else None, why
    )
