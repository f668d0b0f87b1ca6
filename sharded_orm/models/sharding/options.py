"""``ShardMeta`` read: which group a model belongs to, and which field is its shard key."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, cast

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db.models import CharField, Field, IntegerField, Model, TextField

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey, ShardKeyRequired, UnplacedKey
from sharded_orm.models.sharding.kept_shard import find_shard
from sharded_orm.routing.where import ShardKey
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class ShardOptions:
    """What ``ShardMeta`` says. ``key`` is None for an automatic many-to-many table,
    whose rows follow the instance they hang on."""

    model: type[Model]
    group: str
    key: Field[Any, Any] | None

    @cached_property
    def columns(self) -> dict[str, tuple[int, int] | None]:
        """The columns whose values tell the shard, and how; see :class:`ShardKey`."""
        found: dict[str, tuple[int, int] | None] = {}
        # The table of a child may have a column of a name that its parent's has, too.
        names = Counter(field.column for field in self.model._meta.concrete_fields)
        for field in self.model._meta.concrete_fields:
            if names[field.column] > 1:
                continue
            told = self._told_by(field)
            if told is not False:
                found[field.column] = told
        return found

    @cached_property
    def where_key(self) -> ShardKey | None:
        """The same as :mod:`sharded_orm.routing.where` wants it."""
        return ShardKey(self.group, self.columns) if self.columns else None

    def _told_by(self, field: Any) -> tuple[int, int] | Literal[False] | None:
        """How values of ``field`` tell the shard; False if they do not."""
        if self.key is not None and field.column == self.key.column:
            return None
        if (carried := getattr(field, "embedded_shard", None)) is not None:
            return cast("tuple[int, int]", carried)
        # Without a constraint in the database it may refer to a row of another shard.
        if field.is_relation and getattr(field, "db_constraint", False):
            target = field.target_field
            theirs = shard_options(target.model)
            if theirs is not None and theirs.group == self.group:
                return theirs._told_by(target)
        return False

    def tells(self, field: Any) -> bool:
        """Whether values of ``field``, of this model's own table, tell the shard."""
        if field.column not in self.columns:
            return False
        carried = self.columns[field.column]
        return carried is None or carried == runtime.strategy(self.group).embedded

    @cached_property
    def ends(self) -> list[str]:
        """The arguments that tell the shard of a row without a key of its own."""
        return [
            f"{field.name}=…" for field in self.model._meta.concrete_fields if field.is_relation
        ]

    @cached_property
    def key_is_made(self) -> bool:
        """Whether the key is an id that is made on the shard, by or just before the insert."""
        return hasattr(self.key, "embedded_shard")

    @cached_property
    def key_is_prepared(self) -> bool:
        """Whether the field of the key has a ``pre_save()`` of the project's own, which may store
        another value than the instance has, such as the same in lower case."""
        prepare = getattr(type(self.key), "pre_save", None)
        return prepare is not None and not prepare.__module__.startswith(
            ("django.", "sharded_orm.")
        )

    def awaits_key(self, instance: Model) -> bool:
        """Whether ``instance`` is new and its key is still to be made: any shard will do."""
        if not self.key_is_made or not instance._state.adding:
            return False
        return self.key is not None and instance.__dict__.get(self.key.attname) is None

    def key_of(self, instance: Model) -> Any:
        """The shard-key value of ``instance``, as the database would store it.

        :raises ShardKeyRequired: it is None, or the model has no key of its own.
        :raises InvalidShardKey: it is an expression, which the database is to compute.
        """
        if self.key is None:
            raise ShardKeyRequired(
                f"A row of {self.model._meta.object_name} is on the shard of the rows that it relates, and"
                f" this one names none. Give them as instances: {' and '.join(self.ends)}."
            )
        name = f"{self.model._meta.object_name}.{self.key.name}"
        if instance._state.adding and self.key.attname not in instance.__dict__:
            raise ShardKeyRequired(
                f"{name} was not loaded before the row was made a new one; it is the shard key, which"
                " decides where the row is stored. Set it before saving."
            )
        if self.key_is_prepared:
            given = self.key.pre_save(instance, instance._state.adding)
        else:
            given = getattr(instance, self.key.attname)
        if hasattr(given, "resolve_expression"):
            raise InvalidShardKey(
                f"{name} is the shard key, and {given!r} is computed by the database: where the row is"
                " stored has to be known before. Set it to a value before saving."
            )
        value = self.key.get_prep_value(given)
        if value is None:
            raise ShardKeyRequired(
                f"{name} is None; it is the shard key, which"
                " decides where the row is stored. Set it before saving."
            )
        self._refuse_rounded(name, value)
        return value

    def _refuse_rounded(self, name: str, value: Any) -> None:
        # No database keeps the places that its column does not have.
        places = (
            getattr(target_field(self.key), "decimal_places", None)
            if type(value) is Decimal
            else None
        )
        if places is not None and value != round(value, places):
            raise InvalidShardKey(
                f"{name} is the shard key and has {places} decimal places: the database would round"
                f" {value!r}, which is another key. Round it before saving."
            )

    @cached_property
    def _key_may_be_late(self) -> bool:
        # Those that are made on the shard are checked by the insert.
        return (
            self.key is not None
            and type(self.key).pre_save is not Field.pre_save
            and not self.key_is_made
            and not self.key_is_prepared
        )

    def refuse_late_key(self, instance: Model) -> None:
        """Raise if ``pre_save()`` of Django's field would store another key than ``instance`` has.

        Such as today's date (``auto_now_add``): it is asked for when the row is inserted, where the
        value that the row had before has brought it.

        :raises ShardKeyRequired: it would.
        """
        if not self._key_may_be_late:
            return
        key: Any = self.key
        before = instance.__dict__.get(key.attname)
        stored = key.pre_save(instance, add=True)
        if stored != before:
            raise ShardKeyRequired(
                f"{self.model._meta.object_name}.{key.name} was {before!r} when the shard was chosen,"
                f" and the field's own pre_save() makes it {stored!r}. It is the shard key, which"
                " decides where the row is stored. Set it before saving."
            )

    def locate(self, instance: Model) -> Shard | None:
        """The shard that the key of ``instance`` names; None for a key without a shard.

        While its key is still to be made, or if it has none: the shard of ``near``, or of
        the rows of the group that it refers to.
        """
        if self.key is None or self.awaits_key(instance):
            return self._beside(instance)
        return find_shard(instance, self.group, self.key_of(instance), runtime.locate)

    def place(self, instance: Model) -> Shard:
        """The same, for a row that is about to be written.

        One whose key is still to be made, and that refers to no row of the group, gets a
        random shard among the open ones, and keeps it until it is stored.

        :raises NoOpenShard: no shard takes new rows.
        :raises UnplacedKey: ``near`` is a row that has no shard yet itself.
        :raises InvalidShardKey: no row can have the key, or the id of a row that it refers to.
        """
        shard = None
        if self.key is None or self.awaits_key(instance):
            shard = self._beside(instance, for_write=True)
        if shard is not None:
            return shard
        if not self.awaits_key(instance):
            placed = find_shard(instance, self.group, self.key_of(instance), runtime.place)
            assert placed is not None
            return placed
        state: Any = instance._state
        if (near := getattr(state, "near", None)) is not None:
            raise UnplacedKey(
                f"near={describe(near)} is on no shard of group {self.group!r} yet: save it first."
            )
        drawn: int | None = getattr(state, "drawn_shard", None)
        if drawn is None:
            drawn = state.drawn_shard = runtime.strategy(self.group).draw()
        return runtime.shard(self.group, drawn)

    def _beside(self, instance: Any, *, for_write: bool = False) -> Shard | None:
        others = [getattr(instance._state, "near", None), *instance._state.fields_cache.values()]
        for other in others:
            alias = colocated_alias(self, other) if other is not None else None
            if alias is not None:
                return runtime.topology().resolve(alias)
        for field in self.model._meta.concrete_fields:
            value = instance.__dict__.get(field.attname)
            if hasattr(value, "resolve_expression"):
                continue  # Computed by the database, so it tells nothing yet.
            if value is not None and self.tells(field):
                # A row that refers to none that can be is refused, not put on any shard. Where
                # keys are placed, it is its own key that is to be placed, not this one.
                refuses = for_write and not runtime.strategy(self.group).places
                find = runtime.place if refuses else runtime.locate
                return find_shard(instance, self.group, field.get_prep_value(value), find)
        return None


_known: dict[Any, ShardOptions | None] = {}


def shard_options(model: type[Any]) -> ShardOptions | None:
    """The options of ``model``, or None when its rows are in the global database.

    An automatic many-to-many table follows the group of the model that declares it.
    """
    try:
        return _known[model]
    except KeyError:
        return _known.setdefault(model, _read(model))


def options_of(instance: Any) -> ShardOptions | None:
    """The options of an instance's model.

    By ``__class__``: a lazy object, such as ``request.user``, names there what it stands for.
    """
    return shard_options(instance.__class__)


def _read(model: Any) -> ShardOptions | None:
    meta = getattr(model, "_meta", None)
    if meta is None or meta.abstract:
        return None
    if meta.auto_created:
        source = shard_options(meta.auto_created)
        return None if source is None else ShardOptions(model, source.group, None)
    declared = getattr(model, "ShardMeta", None)
    if declared is None or not getattr(model, "_is_sharded", False):
        return None
    group, name = getattr(declared, "group", None), getattr(declared, "shard_key", None)
    if not group or not name:
        raise ImproperlyConfigured(f"{meta.label}.ShardMeta must set both group and shard_key.")
    try:
        key = meta.get_field(name)
    except FieldDoesNotExist as exc:
        raise ImproperlyConfigured(
            f"{meta.label}.ShardMeta.shard_key names {name!r}, which is no field of the model."
        ) from exc
    return ShardOptions(model, group, key)


def group_of(model: type[Any]) -> str | None:
    """The group where the rows of ``model`` are; None for the global database."""
    options = shard_options(model)
    return options.group if options is not None else None


def where_key(model: type[Any]) -> ShardKey | None:
    """The shard key of ``model``, if it has one."""
    options = shard_options(model)
    return options.where_key if options is not None else None


def placements(field: Any, group: str) -> frozenset[tuple[Any, ...]]:
    """What rows have in common, and their shard with it, if their values of ``field`` are equal.

    Of two fields that share one of these, equal values are on one shard of ``group``: both are
    the shard key, or both name one row. Values of any other field may be on any shard.
    """
    found: set[tuple[Any, ...]] = set()
    options = shard_options(field.model)
    if options is None or options.group != group:
        return frozenset()
    if options.tells(field):
        found.add(("key", _kind_of_value(field)))
    while True:
        if field.primary_key:
            found.add(("row", field.model._meta.concrete_model, field.column))
        remote = shard_options(field.related_model) if field.is_relation else None
        if remote is None or remote.group != group:
            return frozenset(found)
        field = field.target_field
        if not field.primary_key:
            return frozenset(found)  # Unique on its shard only.


def _kind_of_value(field: Any) -> Any:
    """What has to be the same for equal values to be equal keys: 1 is not "1"."""
    field = target_field(field)
    if isinstance(field, IntegerField):
        return IntegerField
    return TextField if isinstance(field, CharField | TextField) else type(field)


def target_field(field: Any) -> Any:
    """The field that a foreign key, or a chain of them, refers to in the end; else itself."""
    while field.is_relation:
        field = field.target_field
    return field


def describe(instance: Model) -> str:
    """An instance in an error message; its own ``__str__`` may need a database."""
    # By __dict__, of what a lazy object stands for: while Model.__init__ runs it may not be set
    # yet, and Django would try to load it.
    model: Any = instance.__class__
    row: Any = getattr(instance, "_wrapped", instance)
    values = [row.__dict__.get(field.attname) for field in model._meta.pk_fields]
    return f"{model.__name__}(pk={values[0] if len(values) == 1 else tuple(values)!r})"


def colocated_alias(options: ShardOptions, instance: Any) -> str | None:
    """The alias of the shard where ``instance`` is, when rows of ``options`` live beside it.

    None when it is of another group, global, or not on a shard yet.
    """
    other = options_of(instance)
    if other is None or other.group != options.group:
        return None
    alias = instance._state.db
    if alias is not None and alias != options.group and not instance._state.adding:
        return str(alias)
    # By __dict__: while Model.__init__ runs, a key declared after the relation is not set
    # yet, and Django would take it for deferred and load it.
    if other.key is not None and instance.__dict__.get(other.key.attname) is None:
        return None
    shard = other.locate(instance)
    return shard.alias if shard is not None else None


def shard_key_required(options: ShardOptions, problem: str) -> ShardKeyRequired:
    """The error for a query that names no shard, with the ways out."""
    name = options.model._meta.object_name
    if options.key is None:
        what = f"{name} is an automatic many-to-many table of group {options.group!r}"
        ways = f"filter by an instance of one side ({name}.objects.filter({options.ends[0]}))"
    else:
        key = options.key.name
        what = f"{name} is sharded by {key!r} in group {options.group!r}"
        ways = f"filter by it ({name}.objects.filter({key}=…))"
    return ShardKeyRequired(
        f"{what}, and {problem}: {ways}, name a shard with .using('{options.group}_00000'), or ask"
        " every shard on purpose with .scatter()."
    )
