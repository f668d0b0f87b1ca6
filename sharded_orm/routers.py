"""The database router. It finds the database for Django's queries by means of the topology, the map
of shards to nodes.

Put the router last in ``DATABASE_ROUTERS``. For models that are not sharded, it leaves the choice
of the database to the other routers.
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
#: The app whose table records the decisions (commit or not) about two-phase transactions. This
#: table is on every shard, and on no other database.
APP_OF_DECISIONS = "sharded_orm_two_phase"
#: The names of the models whose tables are in the database of the directory (the table that records
#: the shard of each key).
TABLES_OF_THE_DIRECTORY = frozenset({"placement", "keymove"})

# The alias that standing_on() has set: the router returns it if Django passes no instance. If it is
# None, the router raises ShardKeyRequired instead. Querysets do not use it.
_default_alias: ContextVar[str | None] = ContextVar("sharded_orm_standing", default=None)


@contextmanager
def standing_on(alias: str | None) -> Iterator[None]:
    """Within the ``with`` block, make the router return ``alias`` if Django passes no instance.

    The router also returns ``alias`` for a new row of an automatic many-to-many table. The function
    affects only models of the alias's group, and only the current context (:mod:`contextvars`).

    The views of Django's admin need this: they open their transaction on the database that
    ``router.db_for_write(model)`` returns, before they know the rows.

    :param alias: the alias of a shard or of a whole group; None to undo an outer block.
    """
    token = _default_alias.set(alias)
    try:
        yield
    finally:
        _default_alias.reset(token)


class ShardRouter:
    """The database router. It finds the shard of a row, and the databases of a model's table."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return self._db(model, hints, write=False)

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return self._db(model, hints, write=True)

    def _db(self, model: type[Model], hints: dict[str, Any], *, write: bool) -> str | None:
        instance = hints.get("instance")
        options = shard_options(model)
        if options is None:
            # ``model`` is not sharded. If ``instance`` is sharded, do not return None: Django would
            # then use the shard of ``instance`` (ConnectionRouter._router_func in db/utils.py).
            if instance is not None and options_of(instance) is not None:
                return DEFAULT_DB_ALIAS
            if has_copies(model):
                # The original rows of ``model`` are in the global database, and shards have copies.
                # Return the global database, even if ``instance`` was read from a copy.
                return DEFAULT_DB_ALIAS
            if model._meta.app_label == APP_LABEL and (instance is None or not instance._state.db):
                return _alias_of_library_table(model)
            return None
        alias = _default_alias_in(options.group)
        if instance is None:
            if alias is not None:
                return alias
            raise shard_key_required(options, f"{model.__name__} is read or written without one")
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

        The rows belong to the sharded model of ``options``, and ``instance`` is on no shard of that
        model's group. The router does not learn which relation Django follows. So it cannot know
        whether a value of ``instance`` is the shard key of the rows. (The library's own descriptors
        know the relation, and do not call the router.)

        The result may be the alias of the whole group. Then the shard is determined when the row is
        saved.

        :raises ShardKeyRequired: the rows are to be read, and ``instance`` does not determine their
            shard.
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
            # The shard is not known yet, so return the alias of the whole group. Django calls the
            # router again when the instance is saved.
            return options.group
        if write:
            # Do not return the shard of the related row, because the new row may belong on another
            # shard: for example, Comment(author=person) may get its shard key by another field
            # later. Return the alias of the whole group.
            return options.group
        raise shard_key_required(options, f"{describe(instance)} does not tell the shard")

    def allow_relation(self, obj1: Model, obj2: Model, **hints: Any) -> bool | None:
        """Return True if at least one row is of a sharded model; otherwise None (no opinion).

        Two rows of the same group may be related only if they are on the same shard. A row that is
        on no shard yet may be related to any row.

        :raises CrossShardRelation: the rows are on two shards of one group. It is
            :exc:`CrossKeyRelation` if the relation needs rows of one shard key.
        """
        options1, options2 = options_of(obj1), options_of(obj2)
        if options1 is None and options2 is None:
            return None
        if options1 is None or options2 is None or options1.group != options2.group:
            # The rows are in different groups. Allow the relation: system checks make sure that the
            # foreign key between them has no constraint.
            return True
        aliases = [colocated_alias(options1, obj1), colocated_alias(options2, obj2)]
        if None not in aliases and aliases[0] != aliases[1]:
            error = CrossShardRelation
            if any(
                not options.key and relates_one_key(options) for options in (options1, options2)
            ):
                # One of the rows is of an automatic many-to-many table, so it has no shard key. (If
                # both rows had a key, their keys would have been compared before this call.)
                error = CrossKeyRelation
            raise error(
                f"{describe(obj1)} is on shard {aliases[0]!r} and {describe(obj2)} on {aliases[1]!r}: rows of one"
                f" group can only be related on one shard. Give both the same shard key."
            )
        return True

    def allow_migrate(
        self, db: str, app_label: str, model_name: str | None = None, **hints: Any
    ) -> bool | None:
        """Return whether the table of a model belongs on the database ``db``; None for no opinion.

        Tables of a sharded model belong on the shards of its group and on no other database. Tables
        of other models do not belong on shards. Without ``model_name``, return whether an operation
        such as ``RunPython`` without hints runs on ``db``.
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
            # Ticket servers and the directory's server have only tables of the library.
            return False
        if getattr(apps.app_configs.get(app_label), "tables_on_shards", False):
            # The app declares that each shard of every group has tables of the app.
            return group is not None
        if model_name is not None:
            belongs = self._group_of_model(app_label, model_name)
            if group is not None and named_model_has_copies(app_label, model_name):
                return True
            return belongs == group if belongs is not None or group is not None else None
        # No model is named, so the operation is RunPython or RunSQL without hints. Such an
        # operation runs on every database that has tables of the app.
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
            # These models have no tables. Return False and not None (no opinion): with None,
            # dumpdata would query the tables, which do not exist.
            return False
        return None

    def _group_of_model(self, app_label: str, model_name: str) -> str | None:
        if app_label not in apps.app_configs:
            # The app is not installed. For example, the table of Django's database cache belongs to
            # no app.
            return None
        # Migrations use historical models, which do not derive from ShardedModel. So look up the
        # current model with the same name. If the model was renamed or removed,
        # group_of_historical_model() finds the group.
        try:
            options = shard_options(apps.get_model(app_label, model_name))
        except LookupError:
            return group_of_historical_model(app_label, model_name)
        return options.group if options is not None else None


def _alias_of_library_table(model: type[Model]) -> str | None:
    """Return the alias of the database that has the table of ``model``, a model of this library.

    Return None if other routers may choose the database, or if the model has no table.

    :raises TicketServerRequired: several ticket servers have the table, each with rows of its own.
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
    """Whether ``instance`` is a new row of an automatic many-to-many table.

    Such a table has no shard key.
    """
    options = options_of(instance)
    return options is not None and options.key is None and instance._state.adding


def _refuse_links_to_other_shards(options: ShardOptions, row: Any, alias: str) -> None:
    """Raise :exc:`CrossShardRelation` if ``row`` refers to an instance on another shard.

    :param row: the row to be written.
    :param alias: the alias of the shard to which the row will be written.
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
