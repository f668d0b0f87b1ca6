"""The database router: it tells Django on which shard a row is, and where each table belongs.

Put it last in ``DATABASE_ROUTERS``. For most models that are not sharded, it has no opinion, so
that the other routers choose the database.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model

from sharded_orm import database_settings, runtime
from sharded_orm.exceptions import CrossKeyRelation, CrossShardRelation, UnplacedKey
from sharded_orm.ids.tickets.exceptions import TicketServerRequired
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.historical import (
    group_of_historical_model,
    groups_of_app,
    named_model_has_copies,
)
from sharded_orm.models.sharding.key_errors import describe, shard_key_required
from sharded_orm.models.sharding.options import ShardOptions, options_of, shard_options
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.same_key import relates_one_key

APP_LABEL = "sharded_orm"
#: The app whose table records for each transaction in two phases whether it is committed. This
#: table is on every shard, and in no other database.
APP_OF_DECISIONS = "sharded_orm_two_phase"
#: The names of the models whose tables are in the database of the directory, the table that maps
#: each shard key to its shard.
TABLES_OF_THE_DIRECTORY = frozenset({"placement", "keymove"})

# The alias that standing_on() has set. If Django asks for the database of a sharded model without
# an instance, the router returns this alias. If no alias is set (None), it raises ShardKeyRequired.
# Querysets do not use it.
_default_alias: ContextVar[str | None] = ContextVar("sharded_orm_standing", default=None)


@contextmanager
def standing_on(alias: str | None) -> Iterator[None]:
    """A context manager in which the router returns ``alias`` if Django passes no instance.

    The views of Django's admin need this. Before they know the row, they call
    ``router.db_for_write(model)`` and open a transaction on the result. Without an instance, the
    router could not know the shard.

    The router also returns ``alias`` for a new row of an automatic many-to-many table. Only models
    of the alias's group are affected, and only the current context (:mod:`contextvars`).

    :param alias: the alias of a shard or of a whole group; None ends the effect of an outer block.
    """
    token = _default_alias.set(alias)
    try:
        yield
    finally:
        _default_alias.reset(token)


class ShardRouter:
    """The database router, for the setting ``DATABASE_ROUTERS``."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return self._db(model, hints, write=False)

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return self._db(model, hints, write=True)

    def _db(self, model: type[Model], hints: dict[str, Any], *, write: bool) -> str | None:
        instance = hints.get("instance")
        options = shard_options(model)
        if options is None:
            # ``model`` is not sharded, but ``instance`` may be: for ``photo.author``, Django asks
            # for the global model Author, with the photo as ``instance``. If this router returned
            # None, Django would use the database of ``instance``, that is, the photo's shard
            # (ConnectionRouter._router_func).
            if instance is not None and options_of(instance) is not None:
                return DEFAULT_DB_ALIAS
            if has_copies(model):
                # ``model`` is a reference model: its rows are in the global database, and shards
                # have copies. Return the global database even if ``instance`` was read from a copy.
                return DEFAULT_DB_ALIAS
            if model._meta.app_label == APP_LABEL and (instance is None or not instance._state.db):
                return _alias_of_library_table(model)
            return None
        alias = _default_alias_in(options.group)
        if instance is None:
            if alias is not None:
                return alias
            raise shard_key_required(
                options,
                f"{model.__name__} is read or written without one",
                " If the query has such a condition, its manager does not read it: derive the manager"
                " from ShardedManager, or from a ShardedQuerySet by as_manager(). The base manager,"
                ' which content types use, is replaced by base_manager_name = "objects" in Meta.',
            )
        if alias is not None and _is_new_link_row(instance):
            _refuse_links_to_other_shards(options, instance, alias)
            return alias
        if isinstance(instance, model):
            return self._alias_of_row(options, instance, write=write)
        alias = colocated_alias(options, instance)
        if alias is not None:
            return alias
        return self._alias_from_other_model(options, instance, write=write)

    def _alias_of_row(self, options: ShardOptions, instance: Model, *, write: bool) -> str:
        if not instance._state.adding and instance._state.db not in (None, options.group):
            return str(current_alias(options, instance))
        if write:
            return row_placement.place(options, instance).alias
        shard = row_placement.locate(options, instance)
        if shard is None:
            raise _unplaced_key(options, options.key_of(instance))
        return shard.alias

    def _alias_from_other_model(self, options: ShardOptions, instance: Any, *, write: bool) -> str:
        """Return the alias for rows that are related to ``instance``, an instance of another model.

        The rows belong to the sharded model of ``options``. ``instance`` is not on a shard of this
        model's group: it is new, or in another database. Django does not tell the router by which
        relation the rows and ``instance`` are related. So the router cannot know whether a value of
        ``instance`` is the shard key of the rows. (The library's own descriptors of relations know
        this, so they do not call the router.)

        The result may be the alias of the whole group. Then the shard is found when the row is
        saved.

        :raises ShardKeyRequired: Django wants to read the rows, and ``instance`` does not determine
            their shard.
        """
        instance_options = options_of(instance)
        if (
            instance_options is not None
            and instance_options.group == options.group
            and instance._state.adding
        ):
            if instance_options.awaits_key(instance):
                shard = row_placement.locate(instance_options, instance)
                return shard.alias if shard is not None else options.group
            # ``instance`` is not saved, and has no shard yet. Return the alias of the whole group,
            # because Django calls the router again when the row is saved.
            return options.group
        if write:
            # Return the alias of the whole group, because ``instance`` may have nothing to do with
            # the shard key. For example, Comment(author=person) gets its shard key from the field
            # ``photo``, which may be assigned later.
            return options.group
        raise shard_key_required(options, f"{describe(instance)} does not tell the shard")

    def allow_relation(self, obj1: Model, obj2: Model, **hints: Any) -> bool | None:
        """Return True if at least one row is of a sharded model; otherwise None (no opinion).

        Two rows of the same group may be related only if they are on the same shard. A row that is
        on no shard yet may be related to any row.

        :raises CrossShardRelation: the rows are on two shards of one group. The error is its
            subclass :exc:`CrossKeyRelation` if related rows must even have the same shard key.
        """
        options1, options2 = options_of(obj1), options_of(obj2)
        if options1 is None and options2 is None:
            return None
        if options1 is None or options2 is None or options1.group != options2.group:
            # The rows are in different groups, or one is in the global database. Allow the
            # relation: system checks make sure that the foreign key between them has no constraint.
            return True
        aliases = [colocated_alias(options1, obj1), colocated_alias(options2, obj2)]
        if None not in aliases and aliases[0] != aliases[1]:
            error = CrossShardRelation
            if any(
                not options.key and relates_one_key(options) for options in (options1, options2)
            ):
                # One of the two rows is of an automatic many-to-many table. It has no shard key, so
                # the shard keys of the rows that it connects could not be compared before. They are
                # on different shards, so their keys differ, although they must be equal.
                error = CrossKeyRelation
            raise error(
                f"{describe(obj1)} is on shard {aliases[0]!r} and {describe(obj2)} on {aliases[1]!r}: rows of one"
                f" group can only be related on one shard. Give both the same shard key."
            )
        return True

    def allow_migrate(
        self, db: str, app_label: str, model_name: str | None = None, **hints: Any
    ) -> bool | None:
        """Return whether the table of a model belongs in the database ``db``; None for no opinion.

        The table of a sharded model belongs on the shards of its group and in no other database.
        The tables of most other models do not belong on shards. Without ``model_name``, return
        whether an operation without hints, such as ``RunPython``, is executed on ``db``.
        """
        topology = runtime.topology()
        shard = topology.resolve(db)
        group = shard.group if shard is not None else database_settings.template_group(db)
        if group is None and db in topology.groups:
            return False
        if app_label == APP_OF_DECISIONS:
            return group is not None
        if app_label == APP_LABEL and model_name is not None:
            return group is None and self._allow_library_table(db, model_name)
        if db != DEFAULT_DB_ALIAS and (
            db in runtime.config().tickets or db == runtime.config().directory
        ):
            # The databases of ticket servers and of the directory have only tables of this library.
            return False
        if getattr(apps.app_configs.get(app_label), "tables_on_shards", False):
            # The app's configuration says that all its tables are on each shard of every group.
            return group is not None
        if model_name is not None:
            belongs = self._group_of_model(app_label, model_name)
            if group is not None and named_model_has_copies(app_label, model_name):
                return True
            return belongs == group if belongs is not None or group is not None else None
        # Django passes no model for a RunPython or RunSQL without hints. Execute such an operation
        # on every database that has tables of the app.
        groups = groups_of_app(app_label)
        if group is not None:
            return group in groups
        return None if None in groups or not groups else False

    def _allow_library_table(self, db: str, model_name: str) -> bool | None:
        config = runtime.config()
        if model_name in TABLES_OF_THE_DIRECTORY:
            return db == config.directory
        if model_name == "ticketsequence":
            return db in config.tickets
        if model_name in ("operationrun", "operationstep", "operationscript"):
            return db == DEFAULT_DB_ALIAS
        if model_name in ("shardmap", "topologyversion"):
            # These models have no tables. If the result were None (no opinion) instead of False,
            # dumpdata would query the tables, and fail.
            return False
        return None

    def _group_of_model(self, app_label: str, model_name: str) -> str | None:
        if app_label not in apps.app_configs:
            # No app is installed with this label. For example, Django asks with the label
            # "django_cache" for the table of its database cache.
            return None
        # Migrations use historical models, which do not derive from ShardedModel and do not know
        # their group. So look up the current model with the same name. If it was renamed or removed
        # since, group_of_historical_model() finds the group.
        try:
            options = shard_options(apps.get_model(app_label, model_name))
        except LookupError:
            return group_of_historical_model(app_label, model_name)
        return options.group if options is not None else None


def _alias_of_library_table(model: type[Model]) -> str | None:
    """Return the alias of the database that has the table of ``model``, a model of this library.

    Return None if other routers may choose the database, or if no database has the table.

    :raises TicketServerRequired: several ticket servers have the table, each with different rows.
        So the caller must name one by ``using()``.
    """
    config = runtime.config()
    if model._meta.model_name in TABLES_OF_THE_DIRECTORY:
        return config.directory
    if model._meta.model_name == "ticketsequence":
        if len(config.tickets) > 1:
            raise TicketServerRequired(
                f"Each of the ticket servers {list(config.tickets)!r} has sequences of its own: name one,"
                f" {model.__name__}.objects.using({config.tickets[0]!r})."
            )
        return config.tickets[0] if config.tickets else None
    return None


def _is_new_link_row(instance: Model) -> bool:
    """Return whether ``instance`` is a new row of an automatic many-to-many table."""
    options = options_of(instance)
    return options is not None and options.key is None and instance._state.adding


def _refuse_links_to_other_shards(options: ShardOptions, row: Any, alias: str) -> None:
    """Raise :exc:`CrossShardRelation` if a new many-to-many row refers to a row on another shard.

    :param row: the new row of the many-to-many table.
    :param alias: the alias of the shard on which it will be written.
    """
    if alias == options.group:
        return
    for field in row._meta.concrete_fields:
        other: Any = field.get_cached_value(row, default=None) if field.is_relation else None
        other_options = None if other is None else options_of(other)
        if other_options is None or other_options.group != options.group:
            continue
        if other._state.db not in (None, options.group) and current_alias(
            other_options, other
        ) not in (None, alias):
            raise CrossShardRelation(
                f"{describe(other)} is on shard {other._state.db!r}, and its"
                f" {row._meta.verbose_name} would be written to {alias!r}. Use"
                " the related manager of the row, or using() with its alias."
            )


def _default_alias_in(group: str) -> str | None:
    alias = _default_alias.get()
    if alias is None or alias == group:
        return alias
    shard = runtime.topology().resolve(alias)
    return alias if shard is not None and shard.group == group else None


def _unplaced_key(options: ShardOptions, key: Any) -> UnplacedKey:
    return UnplacedKey(
        f"The key {key!r} of {options.model._meta.object_name} has no shard in group"
        f" {options.group!r} yet: it has no rows. Saving its first row places it."
    )
