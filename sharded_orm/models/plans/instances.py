"""Makes model instances from the rows of a database driver, exactly as Django makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import getattr_static
from typing import Any

from django.db.models import Model
from django.db.models.base import ModelState
from django.db.models.fields.related_descriptors import ForeignKeyDeferredAttribute
from django.db.models.query_utils import DeferredAttribute
from django.db.models.signals import post_init, pre_init

from sharded_orm import compat
from sharded_orm.cache.values import Row

#: A column of a row: its position in the row, its converters, and the column itself.
_Converters = tuple[int, list[Any], Any]


class InstanceLoader:
    """Makes instances of a model from rows that contain columns of the model.

    :param connection: the connection that has read the rows. Only its thread may use the loader.
    :param names: the attnames of the fields in a row, in the order of the columns; None for all
        fields of the model. If fields are missing, the instances have deferred fields.
    :param columns: the columns of a row; None for the columns of the fields. If they are those of
        several tables, the loader only converts values.
    """

    def __init__(
        self,
        model: Any,
        connection: Any,
        names: Sequence[str] | None = None,
        columns: Sequence[Any] | None = None,
    ) -> None:
        fields = model._meta.concrete_fields
        if names is not None:
            by_name = {field.attname: field for field in fields}
            fields = [by_name[name] for name in names]
        self._model = model
        self._connection = connection
        self._alias = connection.alias
        self._is_plain = _is_plain(model)
        #: The attnames of the fields in a row.
        self.names = [field.attname for field in fields]
        table = model._meta.db_table
        self._columns = columns or [field.get_col(table) for field in fields]
        # Django (SQLCompiler.get_converters) applies first the converters of the backend, then
        # those of the fields. Here values() applies the first, and field_values() the second.
        self._of_backend = self._converters(connection.ops.get_db_converters)
        self._of_fields = self._converters(lambda column: column.get_db_converters(connection))

    def _converters(self, find: Callable[[Any], list[Any]]) -> list[_Converters]:
        converters = enumerate(map(find, self._columns))
        return [
            (position, found, self._columns[position]) for position, found in converters if found
        ]

    def values(self, rows: Sequence[Row]) -> list[Row]:
        """Return ``rows`` with values converted by the converters of the backend.

        The values are immutable, and the same for all connections with one vendor and time zone.
        """
        return self._converted(rows, self._of_backend)

    def field_values(self, values: Sequence[Row]) -> list[Row]:
        """Return rows with values converted by the fields' own converters (``from_db_value()``).

        :param values: rows that :meth:`values` has returned. They are not changed.
        """
        return self._converted(values, self._of_fields)

    def _converted(self, rows: Sequence[Row], columns: list[_Converters]) -> list[Row]:
        if not columns:
            return list(rows)
        connection = self._connection
        converted: list[Row] = []
        for row in map(list, rows):
            for position, converters, column in columns:
                value = row[position]
                for converter in converters:
                    value = converter(value, column, connection)
                row[position] = value
            converted.append(row)
        return converted

    def instances(self, values: Sequence[Row], queryset: Any) -> list[Any]:
        """Return model instances, equal to those that ``Model.from_db`` makes.

        :param values: rows that :meth:`values` has returned.
        :param queryset: the queryset that reads the instances; its fetch mode is set on them.
        """
        if self._of_fields:
            values = self.field_values(values)
        # ``receivers`` is checked first, because has_listeners() is slow, and few projects have
        # receivers of these signals.
        model = self._model
        is_plain = self._is_plain and not (
            (pre_init.receivers or post_init.receivers)
            and (pre_init.has_listeners(model) or post_init.has_listeners(model))
        )
        instances = self._plain(values) if is_plain else self._from_db(values, queryset)
        compat.set_fetch_mode(instances, queryset, is_set=not is_plain)
        return instances

    def _from_db(self, values: Sequence[Row], queryset: Any) -> list[Any]:
        from_db = compat.from_db(self._model, queryset)
        return [from_db(self._alias, list(self.names), list(row)) for row in values]

    def _plain(self, values: Sequence[Row]) -> list[Any]:
        model, alias, names = self._model, self._alias, self.names
        # For a plain model, the loop does what from_db and Model.__init__ do, in a fifth of the
        # time.
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
        # Model.__init__ calls super().__init__(). Check that this is object's method: a mixin that
        # is listed after Model in the bases may define another one.
        and super(Model, model).__init__ is object.__init__
        and model.__new__ is object.__new__
        and model.__setattr__ is object.__setattr__
        and all(
            type(getattr_static(model, field.attname))
            in (DeferredAttribute, ForeignKeyDeferredAttribute)
            for field in model._meta.concrete_fields
        )
    )
