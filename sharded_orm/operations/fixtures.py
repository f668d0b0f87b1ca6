"""The transactions in which ``loaddata`` stores the rows of fixtures on shards."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import Any, Self

from django.db import IntegrityError, connections, models, transaction

from sharded_orm.backends.shard_errors import add_shard_note
from sharded_orm.exceptions import PartialCommitError
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.bound_key import unbound
from sharded_orm.models.sharding.options import ShardOptions, required_options
from sharded_orm.operations.relations import checked_relations, refuse_other_keys


class FixtureTransaction:
    """The transactions in which the rows of fixtures are stored, one for each group that has rows.

    The caller has opened a transaction on one database or group, and enters this context manager
    inside it. When :meth:`place` is called for the first row of another group, a transaction on
    that group begins. Until the context ends, the shards do not check foreign keys, because a row
    may refer to a row that comes later in the fixture. :meth:`check_constraints` and
    :meth:`check_keys` check the rows at the end. Not thread-safe.

    :param alias: the alias of the caller's transaction.
    """

    def __init__(self, alias: str) -> None:
        self._aliases = [alias]
        self._committed_aliases: list[str] = []
        self._begun: set[str] = set()
        self._blocks, self._unchecked = ExitStack(), ExitStack()
        #: Maps the alias of a shard to the models of the rows that were stored on it.
        self.models_by_alias: dict[str, set[type[models.Model]]] = {}
        #: Maps pairs (alias of a shard, model) to the primary keys of the stored rows. Only of
        #: models whose relations :meth:`check_keys` must check.
        self._pks: dict[tuple[str, type[models.Model]], set[Any]] = defaultdict(set)
        #: Maps a model to the shard keys of its stored rows. Only of models whose shard key is a
        #: foreign key to the global database.
        self._keys: dict[type[models.Model], set[Any]] = defaultdict(set)
        #: Maps a model to True if :meth:`check_keys` must check its relations, or else to False.
        self._has_relations: dict[type[models.Model], bool] = {}

    def __enter__(self) -> Self:
        self._record_commit(*self._aliases)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Commit the transactions of the groups, one after the other.

        After an error, in the block or at a commit, roll back the transactions that are not committed.
        """
        # End the transactions first, and then enable the check of foreign keys again. A statement
        # enables the check. If a transaction has failed on a shard, the shard accepts no statement
        # before the rollback.
        with self._unchecked:
            self._blocks.__exit__(*exc_info)

    def place(self, options: ShardOptions, row: models.Model) -> str:
        """Return the alias of the shard for ``row``. Begin a transaction for the group of the shard,
        unless there is one already.

        If the row's key has no shard yet, a shard is chosen and recorded permanently.

        :raises ShardKeyRequired: the row has no shard key.
        :raises InvalidShardKey: no row can have this key.
        """
        # Do not check now whether a shard key that is a foreign key refers to an existing row,
        # because that row may come later in the fixture.
        alias = row_placement.place(options, row, check_key=False).alias
        if alias not in self.models_by_alias:
            self._begin(options.group)
            self._unchecked.enter_context(connections[alias].constraint_checks_disabled())
            self.models_by_alias[alias] = set()
        return alias

    def _begin(self, group: str) -> None:
        if group in self._begun:
            return
        self._begun.add(group)
        self._blocks.enter_context(transaction.atomic(using=group))
        if group not in self._aliases:
            self._aliases.append(group)
            self._record_commit(group)

    def _record_commit(self, alias: str) -> None:
        transaction.on_commit(lambda: self._committed_aliases.append(alias), using=alias)

    def check_constraints(self) -> None:
        """Check the foreign keys in the tables of all stored rows. Sends some statements per shard.

        :raises IntegrityError: a row refers to a row that does not exist.
        """
        for alias, stored in self.models_by_alias.items():
            tables = [model._meta.db_table for model in stored]
            try:
                connections[alias].check_constraints(table_names=tables)
            except IntegrityError as exc:
                # Add the name of the shard to the error. Django's own check raises the error, so
                # the code that adds the name to the errors of a shard's queries does not see it.
                add_shard_note(exc, connections[alias].shard)  # type: ignore[attr-defined]  # only connections of shards have this attribute
                raise

    def note(self, row: models.Model, alias: str) -> None:
        """Remember ``row``, which was stored on the shard ``alias``, so that :meth:`check_keys` can
        check its key and relations.
        """
        model: Any = row._meta.concrete_model
        options = required_options(model)
        if options.checks_keys:
            self._keys[model].add(options.key_of(row))
        if model not in self._has_relations:
            self._has_relations[model] = bool(checked_relations(model))
        if self._has_relations[model]:
            self._pks[alias, model].add(row.pk)

    def check_keys(self) -> None:
        """Check the shard keys and the relations of the rows for which :meth:`note` was called.

        A row may be related only to rows of its own shard key. A shard key that is a foreign key
        must refer to an existing row of the global database. Even a key whose shard is recorded
        already is checked. An earlier load of the fixture may have recorded the shard before it
        failed, and a rollback does not remove the record.

        Rows for which :meth:`note` was not called are not checked. Costs one query for each 500
        keys, and one for each relation and 500 rows.

        :raises CrossKeyRelation: a row is related to a row with a different shard key.
        :raises DanglingShardKey: the row to which a shard key refers does not exist.
        """
        # Inside unbound(), queries are not restricted to the shard key that is bound for the
        # request. The rows to check may have any shard key.
        with unbound():
            for (alias, model), pks in self._pks.items():
                refuse_other_keys(model, alias, pks)
        for model, keys in self._keys.items():
            row_placement.refuse_dangling(required_options(model), list(keys))

    def partial_commit(self, cause: Exception) -> PartialCommitError | None:
        """Return the error to raise if only some of the fixture's transactions were committed.

        Return None if all of them were committed, or none. Call this after all transactions have
        ended.

        :param cause: the error of the first transaction that was not committed.
        """
        others = [alias for alias in self._aliases if alias not in self._committed_aliases]
        if not self._committed_aliases or not others:
            return None
        return PartialCommitError(self._committed_aliases, others, cause)
