"""Making model instances from cached rows, exactly as Django makes them from database rows.

The cache holds rows as the database driver returned them, before Django's converters. To become
instances, rows pass the converters of a database connection, then ``from_db`` of the model. So each
:class:`InstanceFactory` belongs to a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from inspect import getattr_static
from typing import Any

from django.db import connections
from django.db.models import Model
from django.db.models.base import ModelState
from django.db.models.fields.related_descriptors import ForeignKeyDeferredAttribute
from django.db.models.query_utils import DeferredAttribute
from django.db.models.signals import post_init, pre_init
from django.db.models.sql import Query

from sharded_orm import compat
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.cache.process_cache import Decoded
from sharded_orm.cache.values import Row
from sharded_orm.models.cached.lookup_plan import LookupPlan


class ConnectionState:
    """What the cache needs to know of a database connection.

    The object tells whether the connection may use the cache now, and makes an
    :class:`InstanceFactory` for each model. It also implements
    :class:`~sharded_orm.cache.repair.Sessions`, so it can find out whether database sessions have
    ended. Only the connection's thread may use the object.
    """

    def __init__(self, connection: ShardConnectionMixin) -> None:
        self._connection: Any = connection
        self._factories: dict[Any, InstanceFactory] = {}
        options = connection.settings_dict.get("OPTIONS") or {}
        # None on SQLite, whose transactions are serializable.
        self._isolation = features_of(connection).isolation_level(options)

    def may_fill(self) -> bool | None:
        """Return how the connection may use the cache at this moment.

        :returns: True if the connection may read from the cache, and store in it what it reads from
            the database; False if it may only read from the cache; None if it must not use the
            cache.
        """
        if self._isolation == "read uncommitted":
            return None  # The connection may read rows that are rolled back later.
        connection = self._connection
        group = connection.group_wrapper
        if connection.connection is None:
            in_transaction = not connection.settings_dict["AUTOCOMMIT"]
        else:
            in_transaction = connection._in_atomic_block or not connection.autocommit
        if not in_transaction and not (group is not None and group.levels):
            return True
        if connection.wrote or connection.needs_rollback or self._isolation != "read committed":
            # The transaction must not use the cache, for one of three reasons: it has uncommitted
            # writes of its own, it must be rolled back, or its reads may show an earlier state.
            return None
        # Each statement under READ COMMITTED reads what is committed at its beginning. So what a
        # transaction reads before it has written anything may be stored, as in autocommit.
        return bool(connection.reads_as_autocommit())

    def factory(self, plan: LookupPlan) -> InstanceFactory:
        factory = self._factories.get(plan)
        if factory is None:
            factory = self._factories[plan] = InstanceFactory(plan, self._connection)
        return factory

    def judges(self, writer: Any) -> bool:
        return bool(self._connection.judges(writer))

    def gone(self, writers: Sequence[Any]) -> set[Any]:
        return set(self._connection.sessions_gone(writers))


class InstanceFactory:
    """Makes instances of a model from rows.

    It also implements :class:`~sharded_orm.cache.requests.Format`, which tells the cache how rows
    of the model are stored and decoded.
    """

    def __init__(self, plan: LookupPlan, connection: Any) -> None:
        model = plan.model
        fields = model._meta.concrete_fields
        self._connection = connection
        self._alias = connection.alias
        self._is_plain = _is_plain(model)
        self._names = [field.attname for field in fields]
        columns = [field.get_col(model._meta.db_table) for field in fields]
        compiler = connection.ops.compiler("SQLCompiler")(Query(model), connection, self._alias)
        # The converters are found in the same way as in Django's RawModelIterable.
        self._converters = [
            (position, tuple(converters), column)
            for position, (converters, column) in compiler.get_converters(columns).items()
        ]
        self._model = model
        self.fingerprint = plan.fingerprint(connection.vendor)
        self.width = len(fields)
        # Connections with the same vendor and time zone share decoded rows, because Django's
        # converters depend on these two. Decoded rows are not shared if a field has its own
        # converter (from_db_value): the converted values may be mutable, or depend on more than the
        # row.
        self.decoded: Decoded | None = None
        if not any(column.get_db_converters(connection) for column in columns):
            self.decoded = plan.decoded(connection.vendor, connection.timezone_name)

    def values(self, rows: Sequence[Row]) -> list[Row]:
        """Return ``rows`` with all values converted by Django's converters."""
        if not self._converters:
            return list(rows)
        connection = self._connection
        converted: list[Row] = []
        for row in map(list, rows):
            for position, converters, column in self._converters:
                value = row[position]
                for converter in converters:
                    value = converter(value, column, connection)
                row[position] = value
            converted.append(row)
        return converted

    def instances(self, values: Sequence[Row], queryset: Any) -> list[Any]:
        """Return model instances, equal to those that ``Model.from_db`` makes.

        :param values: rows that have passed Django's converters.
        :param queryset: the queryset that reads the instances. They get the fetch mode of this
            queryset.
        """
        instances = self._instances(values, queryset)
        compat.set_fetch_mode(instances, queryset)
        return instances

    def _instances(self, values: Sequence[Row], queryset: Any) -> list[Any]:
        model, alias, names = self._model, self._alias, self._names
        # ``receivers`` is checked first, because has_listeners() is slow, and few projects have
        # receivers of these signals.
        if not self._is_plain or (
            (pre_init.receivers or post_init.receivers)
            and (pre_init.has_listeners(model) or post_init.has_listeners(model))
        ):
            from_db = compat.from_db(model, queryset)
            return [from_db(alias, names, list(row)) for row in values]
        # For a plain model, this does what from_db and Model.__init__ do, in a fifth of the time.
        instances = []
        new = object.__new__
        for row in values:
            instance = new(model)
            state = ModelState()
            state.adding = False
            state.db = alias
            attributes = instance.__dict__
            attributes["_state"] = state
            attributes.update(zip(names, row, strict=True))
            instances.append(instance)
        return instances


@lru_cache(maxsize=1024)
def _is_plain(model: Any) -> bool:
    """Whether only Django's code runs when an instance of ``model`` is made and its fields are set.

    False if the model overrides such a method (``__init__``, ``from_db``, …), or if a field of the
    model has a descriptor that is not Django's.
    """
    return (
        model.from_db.__func__ is Model.from_db.__func__  # type: ignore[attr-defined]  # a classmethod
        and model.__init__ is Model.__init__
        # Model.__init__ calls super().__init__(). A mixin that is listed after Model in the bases
        # may define that method.
        and super(Model, model).__init__ is object.__init__
        and model.__new__ is object.__new__
        and model.__setattr__ is object.__setattr__
        and all(
            type(getattr_static(model, field.attname))
            in (DeferredAttribute, ForeignKeyDeferredAttribute)
            for field in model._meta.concrete_fields
        )
    )


def connection_state(alias: str) -> ConnectionState | None:
    """Return the :class:`ConnectionState` of this thread's connection to ``alias``.

    Return None if the database backend is not one of this library. Such a connection does not use
    the cache, because its backend does not tell the cache of writes before COMMIT.
    """
    connection = connections[alias]
    state: ConnectionState | None = connection.__dict__.get("_for_cache")
    if state is None and isinstance(connection, ShardConnectionMixin):
        # Keep the ConnectionState on its connection object, the only one that it can be used for.
        state = connection.__dict__["_for_cache"] = ConnectionState(connection)
    return state
