"""Makes model instances from the rows of a database driver, exactly as Django makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from inspect import getattr_static
from itertools import repeat
from keyword import iskeyword
from types import MethodType
from typing import Any

from django.conf import settings
from django.db.models import DecimalField, JSONField, Model
from django.db.models.base import ModelState
from django.db.models.fields.related_descriptors import ForeignKeyDeferredAttribute
from django.db.models.query_utils import DeferredAttribute
from django.db.models.signals import post_init, pre_init

from sharded_orm import compat
from sharded_orm.cache.values import Row
from sharded_orm.method_origin import module_of

_LOADERS = "_sharded_orm_loaders"
# The maximum number of loaders that a connection keeps.
_MOST_LOADERS = 500

_from_db = Model.from_db.__func__  # type: ignore[attr-defined]  # a classmethod
_init = Model.__init__
# Whether the methods _from_db and _init are those of Django. Another package may have replaced them
# on Model before this module was imported.
_ARE_DJANGOS = {Model.__module__}.issuperset(map(module_of, (_from_db, _init)))

#: A tuple for a column that has converters: the position of the column in a row, its converters,
#: and its expression in the query.
_Converters = tuple[int, list[Any], Any]


class InstanceLoader:
    """Makes instances of a model from rows that contain columns of the model.

    :param connection: the connection that has read the rows. Only its thread may use the loader.
    :param names: the attnames of the fields in a row, in the order of the columns; None for all
        fields of the model. If fields are missing, the instances have deferred fields.
    :param columns: the columns of a row; None for the columns of the fields. If columns of
        several tables are given, the loader converts their values, and makes no instances.
    """

    def __init__(
        self,
        model: Any,
        connection: Any,
        names: Sequence[str] | None = None,
        columns: Sequence[Any] | None = None,
    ) -> None:
        fields = self._declared = model._meta.concrete_fields
        if names is not None:
            by_name = {field.attname: field for field in fields}
            fields = [by_name[name] for name in names]
        self._model = model
        self._connection = connection
        self._alias = connection.alias
        self._is_plain = _is_plain(model)
        #: The attnames of the fields in a row.
        self.names = [field.attname for field in fields]
        self._widths = frozenset({len(self.names)})
        table = model._meta.db_table
        self._columns = columns or [field.get_col(table) for field in fields]
        # Like Django's SQLCompiler.get_converters(): the converters of the backend run first, those
        # of the fields second. values() runs those of the backend, instances() those of the
        # fields.
        self._of_backend = self._converters(connection.ops.get_db_converters)
        self._of_fields = self._converters(lambda column: column.get_db_converters(connection))
        # Each converter of a row, in the order in which Django calls them.
        self._steps = [
            (position, converter, column)
            for position in range(len(self._columns))
            for at, converters, column in (*self._of_backend, *self._of_fields)
            if at == position
            for converter in converters
        ]
        self._make = self._make_loaded = None
        if columns is None and _has_plain_attributes(model, self.names):
            self._make = _loop(tuple(self.names))
            if self._is_plain:
                positions = tuple(position for position, _, _ in self._steps)
                self._make_loaded = _loop(tuple(self.names), positions)
        #: Whether this loader can also make instances from rows of another connection whose
        #: settings differ only in the schema. False if the project or another package has written a
        #: converter, because a converter gets the connection as an argument, and its result may
        #: depend on the connection.
        self.serves_others = not any(
            _is_own(converter)
            for _, converters, _ in (*self._of_backend, *self._of_fields)
            for converter in converters
        )
        # The decimal places of each DecimalField. SQLite's converter rounds to this number of
        # places, so a loader is out of date if a program changes the number.
        self._places = [(field, field.decimal_places) for field in self._fields(DecimalField)]
        # The JSON fields. The converter of a JSONField is Django's, but it may call a decoder of
        # the project.
        self._json_fields = self._fields(JSONField)

    def _converters(self, find: Callable[[Any], list[Any]]) -> list[_Converters]:
        converters = enumerate(map(find, self._columns))
        return [
            (position, found, self._columns[position]) for position, found in converters if found
        ]

    def _fields(self, kind: type) -> list[Any]:
        fields: list[Any] = []
        for column in self._columns:
            field = getattr(column, "target", None)
            while field is not None:
                fields.append(field)
                # Add the base field of an ArrayField, because the converter of the ArrayField calls
                # the converter of the base field.
                field = getattr(field, "base_field", None)
        return [field for field in fields if isinstance(field, kind)]

    def knows_all_fields(self) -> bool:
        """Whether the model's fields and their decimal places are as when the loader was made."""
        # Django makes a new list when a field is added, so compare the identity of the lists.
        if self._declared is not self._model._meta.concrete_fields:
            return False
        return not self._places or all(
            field.decimal_places == places for field, places in self._places
        )

    def values(self, rows: Sequence[Row]) -> list[Row]:
        """Return ``rows`` with values converted by the converters of the backend.

        The values are immutable, and depend only on the vendor and the time zone of the connection.
        So connections with the same vendor and time zone can share them.
        """
        return self._converted(rows, self._of_backend)

    def _converted(self, rows: Sequence[Row], columns: list[_Converters]) -> list[Row]:
        if not columns:
            return list(rows)
        connection = self._connection
        converted: list[Any] = list(map(list, rows))
        for position, converters, column in columns:
            for converter in converters:
                for row in converted:
                    row[position] = converter(row[position], column, connection)
        return converted

    def converted(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return ``rows``, converted first by the backend's converters, then by the fields'.

        :param rows: rows as the driver has returned them. They are not changed.
        """
        steps, connection = self._steps, self._connection
        if not steps:
            return rows
        converted: list[Any] = list(map(list, rows))
        for row in converted:
            for position, converter, column in steps:
                row[position] = converter(row[position], column, connection)
        return converted

    def is_unobserved(self) -> bool:
        """Whether :meth:`loaded` runs no code of the project or of another package.

        If True, nobody can observe at which moment the instances are made. It is True if the model
        replaces no method of Django that makes instances, if no receiver listens to ``pre_init`` or
        ``post_init``, and if no converter and no decoder of a JSONField is a project's own.
        """
        return not (
            self._make_loaded is None
            or not self.serves_others
            or pre_init.receivers
            or post_init.receivers
            or not _calls_django(self._model)
            or [field for field in self._json_fields if field.decoder is not None]
        )

    def loaded(
        self, rows: Sequence[Row], queryset: Any, aliases: Sequence[str] | None = None
    ) -> list[Any]:
        """Convert ``rows``, and return their model instances.

        :param rows: rows as the driver of the loader's connection has returned them.
        :param aliases: the alias of each row's database; None if all rows are from the database of
            the loader's connection.
        """
        if aliases is None:
            aliases = [self._alias] * len(rows)
        make = self._make_loaded
        # These are some of the conditions in is_unobserved(). They are repeated here, because a
        # call of is_unobserved() would slow down reads of single rows.
        if (
            make is None
            or pre_init.receivers
            or post_init.receivers
            or not _calls_django(self._model)
        ):
            return self._instances(self.converted(rows), aliases, queryset)
        instances = make(self._model, rows, aliases, self._connection, self._steps)
        if compat.HAS_FETCH_MODES:
            compat.set_fetch_mode(instances, queryset, is_set=False)
        return instances

    def instances(
        self, values: Sequence[Row], queryset: Any, aliases: Iterable[str] | None = None
    ) -> list[Any]:
        """Return model instances, equal to those that ``Model.from_db`` makes.

        :param values: rows that :meth:`values` has returned.
        :param queryset: the queryset that reads the instances; its fetch mode is set on them.
        :param aliases: the alias of the connection that has read each row; None if the loader's
            connection has read all of them. See :attr:`serves_others`.
        """
        if aliases is None:
            aliases = repeat(self._alias, len(values))
        if self._of_fields:
            values = self._converted(values, self._of_fields)
        return self._instances(values, aliases, queryset)

    def _instances(self, values: Sequence[Row], aliases: Iterable[str], queryset: Any) -> list[Any]:
        # Check ``receivers`` first. It is usually empty, and then the slow has_listeners() need not
        # be called.
        model = self._model
        is_plain = (
            self._is_plain
            and _calls_django(model)
            and not (
                (pre_init.receivers or post_init.receivers)
                and (pre_init.has_listeners(model) or post_init.has_listeners(model))
            )
        )
        if is_plain:
            instances = self._plain(values, aliases)
        else:
            instances = self._from_db(values, aliases, queryset)
        compat.set_fetch_mode(instances, queryset, is_set=not is_plain)
        return instances

    def _from_db(self, values: Sequence[Row], aliases: Iterable[str], queryset: Any) -> list[Any]:
        from_db = compat.from_db(self._model, queryset)
        return [
            from_db(alias, list(self.names), list(row))
            for alias, row in zip(aliases, values, strict=True)
        ]

    def _plain(self, values: Sequence[Row], aliases: Iterable[str]) -> list[Any]:
        model, names = self._model, self.names
        if not self._widths.issuperset(map(len, values)):
            raise ValueError(f"A row of {model.__name__} has not {len(names)} values.")
        # For a plain model, the loop does what from_db and Model.__init__ do, in a fifth of the
        # time.
        if self._make is not None:
            return self._make(model, values, aliases)
        instances = []
        new = object.__new__
        for alias, row in zip(aliases, values, strict=True):
            instance = new(model)
            instance._state = state = ModelState()
            state.adding = False
            state.db = alias
            # The lengths were compared above. strict=True would double the time of this line.
            instance.__dict__.update(zip(names, row))  # noqa: B905
            instances.append(instance)
        return instances


def loader_of(key: tuple[Any, tuple[str, ...] | None, Any], connection: Any) -> InstanceLoader:
    """Return the :class:`InstanceLoader` for rows that ``connection`` has read.

    The connection keeps its loaders, so mostly no loader is made.

    :param key: a tuple (model, names, joined). ``names`` are the attnames of the fields in a row,
        or None for all fields. ``joined`` is the :class:`JoinedInstances` of joined rows, or None
        if the rows are of one table.
    """
    # Keep the loaders in an attribute of the connection, because each loader uses its connection.
    # There is a dict for each value of USE_TZ, because MySQL's converters depend on USE_TZ.
    kept = connection.__dict__.get(_LOADERS)
    if kept is None:
        kept = connection.__dict__[_LOADERS] = {True: {}, False: {}}
    try:
        # A faster settings.USE_TZ: it avoids the call of the settings' __getattr__().
        uses_zones = object.__getattribute__(settings, "USE_TZ")
    except AttributeError:
        uses_zones = settings.USE_TZ
    loaders = kept[bool(uses_zones)]
    loader: InstanceLoader | None = loaders.get(key)
    if loader is None or not loader.knows_all_fields():
        if len(loaders) >= _MOST_LOADERS:
            loaders.clear()
        model, names, joined = key
        columns = None if joined is None else joined.columns
        loader = loaders[key] = InstanceLoader(model, connection, names, columns)
    return loader


def _has_plain_attributes(model: Any, names: Sequence[str]) -> bool:
    """Whether generated code can set these fields by assignments such as ``instance.title = v1``.

    That is so if the descriptor of each field is Django's, and if each attname is an ordinary word.

    :param names: the attnames of the fields.
    """
    attributes = [getattr_static(model, name) for name in names]
    return {DeferredAttribute}.issuperset(map(type, attributes)) and all(map(_is_word, names))


def _is_own(converter: Any) -> bool:
    """Whether ``converter`` is neither Django's nor this library's.

    The converter of an ArrayField is Django's, but calls that of the values in the array. So in
    this case, the converter of these values counts.
    """
    module = getattr(converter, "__module__", None) or ""
    if not module.startswith(("django.", "sharded_orm.")):
        return True
    base = getattr(getattr(converter, "__self__", None), "base_field", None)
    of_values = getattr(base, "from_db_value", None)
    return of_values is not None and _is_own(of_values)


def _is_word(name: str) -> bool:
    # When Python compiles code, it replaces some letters that are not ASCII by others. Generated
    # code would then set an attribute with another name.
    return name.isascii() and name.isidentifier() and "__" not in name and not iskeyword(name)


@lru_cache(maxsize=1024)
def _loop(names: tuple[str, ...], positions: tuple[int, ...] = ()) -> Callable[..., list[Any]]:
    """Return a function that makes instances of plain models whose fields have these attnames.

    The function is compiled from text that contains the names, as in ``instance.title = v1``. Such
    assignments take half of the time of ``__dict__.update()``. The instances also take less memory:
    as long as nobody reads ``__dict__``, Python makes no dict.

    :param positions: for each converter that the function calls, the position of its value in a
        row.
    """
    steps = range(len(positions))
    text = _LOOP.format(
        values="".join(f"v{position}, " for position in range(len(names))),
        steps="".join(f"(_, c{step}, k{step}), " for step in steps),
        conversions="".join(
            f"        v{position} = c{step}(v{position}, k{step}, connection)\n"
            for step, position in enumerate(positions)
        ),
        assignments="".join(
            f"        instance.{name} = v{position}\n" for position, name in enumerate(names)
        ),
    )
    scope: dict[str, Any] = {"ModelState": ModelState}
    exec(text, scope)
    make: Callable[..., list[Any]] = scope["make"]
    return make


_LOOP = """
def make(model, rows, aliases, connection=None, steps=(), new=object.__new__):
    instances = []
    [{steps}] = steps
    for alias, ({values}) in zip(aliases, rows, strict=True):
{conversions}
        instance = new(model)
        instance._state = state = ModelState()
        state.adding = False
        state.db = alias
{assignments}
        instances.append(instance)
    return instances
"""


def _calls_django(model: Any) -> bool:
    """Whether ``model`` makes instances, and sets their attributes, by Django's own methods.

    If a project or another package has replaced one of them, such as ``from_db()``, the loader must
    call it. That can happen at any time, so this is checked at each read.
    """
    # A project may have replaced a method by an object, such as a proxy, that claims to be equal to
    # Django's method and has all its attributes. So compare by "is", and also look at the type.
    return (
        type(model.from_db) is MethodType
        and model.from_db.__func__ is _from_db
        and model.__init__ is _init
        and model.__new__ is object.__new__
        and model.__setattr__ is object.__setattr__
    )


def _is_plain(model: Any) -> bool:
    """Whether an instance can be made without calling its ``__init__()``.

    Return False if a mixin has an ``__init__()``, or if a field has a descriptor that is not
    Django's, because their code would not run. This function checks what a class defines;
    :func:`_calls_django` checks methods that may be replaced at run time.
    """
    return (
        _ARE_DJANGOS
        # Model.__init__ calls super().__init__(). Check that this calls object.__init__(), and not
        # that of a mixin, which may follow Model in the bases.
        and super(Model, model).__init__ is object.__init__
        and all(
            type(getattr_static(model, field.attname))
            in (DeferredAttribute, ForeignKeyDeferredAttribute)
            for field in model._meta.concrete_fields
        )
    )
