"""Find misplaced rows. A misplaced row is not on the shard of its shard key, so queries miss it."""

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

#: Size of a batch: the number of shard keys, read from rows, whose shards are looked up together.
KEYS = 5000
#: For each table of each shard, the largest number of keys that are reported as examples.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class StrayKey:
    """A shard key that has rows on a wrong shard.

    :param home: the alias of the right shard; None if the key has no shard.
    :param why: the strategy's explanation why the key belongs on ``home``, or has no shard.
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
    :param keys: number of distinct shard keys of the misplaced rows.
    :param rows: number of misplaced rows; if a sample was read, only those in the sample.
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
    """A scan for misplaced rows, and its results.

    Not thread-safe: give each thread its own instance, and merge the instances with :meth:`add`.

    :param sample: number of rows to read from each table of each shard, in the order of the primary
        key. If the primary key is an integer, the sample begins at a random row; otherwise at the
        first row. None reads all rows.
    :param looked_at: number of rows that were checked.
    """

    sample: int | None
    looked_at: int = 0
    misplaced: list[Misplaced] = field(default_factory=list)
    #: Why rows could not be checked. The reason is stored under the alias of the shard if its rows
    #: could not be read, and under the group's name if the look-up of a key's shard failed.
    errors: dict[str, str] = field(default_factory=dict)

    def read(self, wrapper: Any, shards: Sequence[Shard], alive: Alive) -> None:
        """Check whether the rows on ``shards`` are on the shard of their key.

        Rows of keys that are moving, or have moved meanwhile, are not reported.

        ``shards`` must all be on one node and belong to one group.

        Cost for each model: a sample takes one statement per 256 shards. A scan of all rows, and
        any scan on SQLite, takes one statement per shard. Keys in the directory (the table of each
        key's shard) take one more query per 500 keys. Memory: the keys of one batch.

        :param wrapper: a connection object of the node. It belongs to no shard.
        :param alive: called after each batch, to report that the node answers.
        """
        if not shards:
            return
        for options in sharded_models(shards[0].group):
            key = _key_field(options)
            one: Any = connections[shards[0].alias]
            counts = TableRows(options.model, one, self.sample).value_counts(key)
            read = TableRead(one, options.model, [key], counts)
            # Rows of keys that are moving must not be reported, because for a moment they may be on
            # two shards.
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
                # Convert the key to the form that the database stores, because strategies expect
                # this form.
                batch.append((shard, key.get_prep_value(value), count))
                if len(batch) >= KEYS:
                    self._check_rows(options, batch, misplaced, moving)
                    batch.clear()
                    alive()
            self._check_rows(options, batch, misplaced, moving)
            self.misplaced += misplaced.values()
            alive()

    def _record_failure(self, group: str, exc: Error) -> None:
        # This error comes from the server of the directory (the table of the shard of each key), not
        # from the node with the rows. So report it under the group's name.
        remedy = missing_table_remedy(exc, runtime.config().directory)
        # The sentence that contains this text ends with a full stop.
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
    """Return the models of ``group`` whose own table has a column for the shard key, sorted by
    label.

    Automatic many-to-many tables are left out, because their foreign keys ensure that their rows
    are on the right shard.
    """
    models = []
    for model in apps.get_models():
        options = shard_options(model)
        meta = model._meta
        if options is not None and options.group == group and options.key is not None:
            # With multi-table inheritance, only the parent's table has the shard key. So leave the
            # child model out.
            is_own = options.key in meta.local_concrete_fields
            if meta.managed and not meta.proxy and is_own:
                models.append(options)
    return sorted(models, key=lambda options: options.model._meta.label)


def _key_field(options: ShardOptions) -> Field[Any, Any]:
    assert options.key is not None
    return options.key


def _homes(group: str, keys: set[Any]) -> dict[Any, int | None]:
    """Return a dict from each key to the number of its shard, or to None if the key has no shard."""
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
