"""``manage.py loaddata``: Django's command. It also loads the rows of sharded models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from django.core.management import CommandError
from django.core.management.base import CommandParser
from django.core.management.commands import loaddata
from django.core.serializers.base import DeserializedObject
from django.db import DEFAULT_DB_ALIAS, IntegrityError, models

from sharded_orm import runtime
from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.exceptions import CrossKeyRelation, RoutingError, ShardedOrmError
from sharded_orm.management.database_option import make_optional
from sharded_orm.models.fields import TicketField
from sharded_orm.models.querysets.route import scoped
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.operations.fixtures import FixtureTransaction


class Command(loaddata.Command):
    """Loads each row of a fixture into the database where the row belongs.

    Without ``--database``, rows of sharded models go to the shards of their keys, and all other
    rows to the default database. With the alias of a shard group, only the rows of that group are
    loaded. With any other alias, only the rows of that database are loaded, as Django does.
    """

    help = (
        "Installs the named fixture(s). Each row is loaded where it belongs: on the shard of its key,"
        " or in the default database."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        make_optional(
            parser, "Load only the rows of this group, shard or database. By default: all rows."
        )

    def handle(self, *fixture_labels: Any, **options: Any) -> None:
        alias: str | None = options["database"]
        topology = runtime.topology()
        self._is_routed = alias is None
        self._group = alias if alias in topology.groups else None
        self._shard = topology.resolve(alias) if alias is not None else None
        self._alias = alias or DEFAULT_DB_ALIAS
        self._transaction = FixtureTransaction(self._alias)
        #: Maps labels of models to the number of rows that were not loaded, because they do not
        #: belong on the alias in ``--database``.
        self._left_out: Counter[str] = Counter()
        #: The sequences of ticket servers from which the ids in the fixture come.
        self._sequences: set[str] = set()
        try:
            super().handle(*fixture_labels, **{**options, "database": self._alias})
        except Exception as exc:
            error = self._transaction.partial_commit(exc) or exc
            copied = sorted(model._meta.label for model in self.models if has_copies(model))
            if isinstance(error, IntegrityError) and copied and self._transaction.models_by_alias:
                raise CommandError(
                    f"{exc}\nRows of {copied!r} are copied to the shards after the commit, so rows of sharded"
                    " models cannot refer to them in the same fixture. Load them before, in a fixture of"
                    " their own."
                ) from exc
            if isinstance(error, ShardedOrmError):
                raise CommandError(str(error)) from exc
            raise

    def loaddata(self, fixture_labels: Any) -> None:
        with self._transaction:
            super().loaddata(fixture_labels)
            self._report_left_out()
        self._report_sequences()

    # -- Loading ---------------------------------------------------------------

    def load_label(self, fixture_label: str) -> None:
        # The name of a fixture file can contain a database alias. Django only finds such a file if
        # the alias is that in self.using. So find the files before self.using is changed; Django
        # caches the result. Then set self.using to None, unless all rows belong in one ordinary
        # database. With None, the router chooses the database in which Django looks up each natural
        # key.
        self.find_fixtures(fixture_label)
        shard = self._shard
        own = (DEFAULT_DB_ALIAS, *runtime.config().tickets, runtime.config().directory)
        routed = self._alias in own or self._group is not None or shard is not None
        self.using = None if routed else self._alias  # type: ignore[assignment]  # Django passes None on to the router
        try:
            with scoped(shard.alias) if shard is not None else nullcontext():
                super().load_label(fixture_label)
        finally:
            self.using = self._alias

    def save_obj(self, obj: DeserializedObject) -> bool:
        model = type(obj.object)
        if model in self.excluded_models or model._meta.app_config in self.excluded_apps:
            # ``--exclude`` leaves this row out. Return before the row's key is placed on a shard.
            return False
        options = shard_options(model)
        if not self._selects(options):
            self._left_out[model._meta.label] += 1
            return False
        self._sequences.update(_sequences_of_ids(obj.object))
        if options is None:
            with self._on(self._alias, self.models):
                saved: bool = super().save_obj(obj)
            if not saved:
                self._left_out[model._meta.label] += 1
            return saved
        try:
            if self._shard is not None:
                return self._save_sharded(obj, self._shard.alias, self.models)
            alias = self._transaction.place(options, obj.object)
            return self._save_sharded(obj, alias, self._transaction.models_by_alias[alias])
        except RoutingError as exc:
            # Name the row in the message, as Django's command does for the errors that it knows.
            if not str(exc).startswith("Could not load"):
                exc.args = (f"Could not load {model._meta.label}(pk={obj.object.pk}): {exc}",)
            raise

    def _selects(self, options: ShardOptions | None) -> bool:
        """Return whether the rows of a model belong on the alias in ``--database``.

        :param options: the model's shard options; None if the model is not sharded.
        """
        group = self._shard.group if self._shard is not None else self._group
        if options is None:
            return group is None
        return self._is_routed or options.group == group

    def _save_sharded(
        self, obj: DeserializedObject, alias: str, stored: set[type[models.Model]]
    ) -> bool:
        # Save the row without its relations. They are stored after all rows of the fixture, because
        # the rows to which they lead may come later in the fixture.
        relations, obj.m2m_data = obj.m2m_data, None
        deferred, obj.deferred_fields = obj.deferred_fields, {}
        with self._on(alias, stored):
            saved: bool = super().save_obj(obj)
        if saved:
            self._transaction.note(obj.object, alias)
        obj.deferred_fields = deferred
        if relations or deferred:
            self.objs_with_deferred_fields.append(_LaterRelations(obj, alias, relations))  # type: ignore[arg-type]  # of each item, Django only calls save_deferred_fields()
        return saved

    @contextmanager
    def _on(self, alias: str, stored: set[type[models.Model]]) -> Iterator[None]:
        """In the ``with`` block, Django's code saves rows on ``alias``.

        :param stored: a set to which Django adds the models of the rows.
        """
        outer = self.using, self.models
        self.using, self.models = alias, stored
        try:
            yield
        finally:
            self.using, self.models = outer

    def reset_sequences(self, connection: Any, models: Any) -> None:
        # Django calls this method after it has checked the constraints of its own database, and
        # only if rows were loaded. Check the constraints of the shards at the same time.
        try:
            self._transaction.check_constraints()
            self._transaction.check_keys()
        except (IntegrityError, CrossKeyRelation) as exc:
            # Django's message for a violated constraint begins with these words.
            exc.args = (f"Problem installing fixtures: {exc}",)
            raise
        super().reset_sequences(connection, models)

    # -- Messages --------------------------------------------------------------

    def _report_left_out(self) -> None:
        if not self._left_out:
            return
        labels = sorted(self._left_out)
        remedy = (
            "Name their database with --database."
            if self._is_routed
            else "Without --database, each row is loaded where it belongs."
        )
        message = (
            f"{self._left_out.total()} object(s) of {labels!r} were not loaded, because they do not"
            f" belong on {self._alias!r}. {remedy}"
        )
        # In a test run, this is no error: Django's test cases load each fixture once for each
        # alias, so for some aliases no row is left.
        if not self.loaded_object_count and not test_databases:
            raise CommandError(message)
        if self.verbosity >= 1:
            self.stderr.write(message)

    def _report_sequences(self) -> None:
        if self._sequences and self.verbosity >= 1:
            names = " ".join(sorted(self._sequences))
            self.stderr.write(
                f"The fixtures bring ids of ticket servers. 'manage.py tickets verify {names}' checks"
                " whether a server would hand out one of them again, and 'manage.py tickets advance"
                f" {names}' moves the servers above them."
            )


class _LaterRelations:
    """The relations of one row, which are stored after all rows of the fixtures.

    Django has a list of rows with deferred fields, and at the end calls ``save_deferred_fields()``
    of each item. Objects of this class are put on that list in place of rows.
    """

    def __init__(
        self, obj: DeserializedObject, alias: str, relations: dict[str, Any] | None
    ) -> None:
        self._obj = obj
        self._alias = alias
        self._relations = relations or {}

    def save_deferred_fields(self, using: str | None = None) -> None:
        if self._obj.deferred_fields:
            with scoped(self._alias):
                self._obj.save_deferred_fields(using=None)
        for accessor, rows in self._relations.items():
            getattr(self._obj.object, accessor).set(rows)


def _sequences_of_ids(row: models.Model) -> Iterator[str]:
    for field in row._meta.concrete_fields:
        if isinstance(field, TicketField) and getattr(row, field.attname) is not None:
            yield field.sequence_name
