"""The options of a sharded model: its group and shard key, from ``class ShardMeta``.

A group is a numbered set of shards with one routing strategy, which finds the shard of a key. The
options also find the shard of an instance. To *place* a key means to choose its shard and record
the shard permanently. Strategies that compute the shard from the key do not need this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, cast

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db.models import Field, Model

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey, ShardKeyChanged, ShardKeyRequired, UnplacedKey
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.kept_shard import find_shard
from sharded_orm.models.sharding.new_keys import refuse_dangling_keys
from sharded_orm.routing.where_clause import ShardKey
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class ShardOptions:
    """The group and the shard key of a model.

    ``key`` is None for an automatic many-to-many table. Each row of such a table is on the same
    shard as the two rows that it relates.

    ``same_key`` says whether rows of this model may be related only to rows with their own key, see
    :mod:`sharded_orm.models.sharding.same_key`.
    """

    model: type[Model]
    group: str
    key: Field[Any, Any] | None
    same_key: bool = True

    @cached_property
    def columns(self) -> dict[str, tuple[int, int] | None]:
        """The columns whose values determine the shard of a row, in the format of ``ShardKey.columns``.

        The dict maps the name of a column to ``(shift, bits)`` if the column contains ids with the
        shard number in these bits. It maps the name to None if the column contains shard keys.
        """
        bits_by_column: dict[str, tuple[int, int] | None] = {}
        # In multi-table inheritance, the tables of parent and child may have columns with the same
        # name. Leave such columns out, because the name does not determine the table.
        names = Counter(field.column for field in self.model._meta.concrete_fields)
        for field in self.model._meta.concrete_fields:
            column: Any = field.column
            if names[column] > 1:
                continue
            bits = self._shard_bits(field)
            if bits is not False:
                bits_by_column[column] = bits
        return bits_by_column

    @cached_property
    def where_key(self) -> ShardKey | None:
        """The group, and the columns whose values determine the shard; None without such a column.

        The result is for :mod:`sharded_orm.routing.where_clause`.
        """
        return ShardKey(self.group, self.columns) if self.columns else None

    def _shard_bits(self, field: Any) -> tuple[int, int] | Literal[False] | None:
        """Return in which form the values of ``field`` contain the shard of a row.

        Return ``(shift, bits)`` if each value is an id with the shard number in these bits. Return
        None if each value is a shard key. Return False if the values do not determine the shard.
        """
        if self.key is not None and field.column == self.key.column:
            return None
        if (bits := getattr(field, "embedded_shard", None)) is not None:
            return cast("tuple[int, int]", bits)
        # Follow only foreign keys with a database constraint. Without a constraint, the referenced
        # row may be on another shard.
        if field.is_relation and getattr(field, "db_constraint", False):
            target = field.target_field
            target_options = shard_options(target.model)
            if target_options is not None and target_options.group == self.group:
                return target_options._shard_bits(target)
        return False

    def names_shard(self, field: Any) -> bool:
        """Whether the values of ``field``, a field of this model, determine the shard of a row."""
        if field.column not in self.columns:
            return False
        bits = self.columns[field.column]
        return bits is None or bits == runtime.strategy(self.group).embedded

    @cached_property
    def relations(self) -> list[Any]:
        """The foreign keys of the model."""
        return [field for field in self.model._meta.concrete_fields if field.is_relation]

    @cached_property
    def relation_arguments(self) -> list[str]:
        """Texts such as ``photo=…`` for an error message, one for each relation of this model.

        If the model has no shard key, these keyword arguments can determine the shard of a query.
        """
        return [f"{field.name}=…" for field in self.relations]

    @cached_property
    def key_is_generated(self) -> bool:
        """Whether the shard key is an id that is generated by the insert, or just before the insert."""
        return hasattr(self.key, "embedded_shard")

    @cached_property
    def key_has_pre_save(self) -> bool:
        """Whether the shard key's field has a ``pre_save()`` from outside Django and this package.

        So the stored key may differ from that of the instance: such a method may return the value
        in lower case.
        """
        prepare = getattr(type(self.key), "pre_save", None)
        return prepare is not None and not prepare.__module__.startswith(
            ("django.", "sharded_orm.")
        )

    def awaits_key(self, instance: Model) -> bool:
        """Whether ``instance`` is new and its shard key has not been generated yet.

        If so, its shard does not depend on the key, because the key is generated for the shard.
        """
        if not self.key_is_generated or not instance._state.adding:
            return False
        return self.key is not None and instance.__dict__.get(self.key.attname) is None

    def key_of(self, instance: Model) -> Any:
        """Return the shard-key value of ``instance``, as the database would store it.

        :raises ShardKeyRequired: the value is None or was not loaded, or the model has no shard key.
        :raises InvalidShardKey: the value is an expression, which only the database can compute, or it
            has more decimal places than the column.
        """
        if self.key is None:
            raise ShardKeyRequired(
                f"A row of {self.model._meta.object_name} is on the shard of the rows that it relates, and"
                f" this one names none. Give them as instances: {' and '.join(self.relation_arguments)}."
            )
        name = f"{self.model._meta.object_name}.{self.key.name}"
        if instance._state.adding and self.key.attname not in instance.__dict__:
            raise ShardKeyRequired(
                f"{name} was not loaded before the row was made a new one; it is the shard key, which"
                " decides where the row is stored. Set it before saving."
            )
        if self.key_has_pre_save:
            raw = self.key.pre_save(instance, instance._state.adding)
        else:
            raw = getattr(instance, self.key.attname)
        if hasattr(raw, "resolve_expression"):
            raise InvalidShardKey(
                f"{name} is the shard key, and {raw!r} is computed by the database: where the row is"
                " stored has to be known before. Set it to a value before saving."
            )
        value = self.key.get_prep_value(raw)
        if value is None:
            raise ShardKeyRequired(
                f"{name} is None; it is the shard key, which"
                " decides where the row is stored. Set it before saving."
            )
        self._refuse_rounded(name, value)
        return value

    def _refuse_rounded(self, name: str, value: Any) -> None:
        # Refuse a value with more decimal places than its column: the database would round it, and
        # so store another key.
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
    def _key_may_change_on_insert(self) -> bool:
        # The result is False for two kinds of keys, which are checked elsewhere. A generated key
        # is checked by the insert. If the project has defined pre_save() of the key, key_of() calls
        # it before the shard is chosen.
        return (
            self.key is not None
            and type(self.key).pre_save is not Field.pre_save
            and not self.key_is_generated
            and not self.key_has_pre_save
        )

    def refuse_key_changed_on_insert(self, instance: Model) -> None:
        """Raise an error if ``pre_save()`` of the shard key's field would change the key of a new row.

        Django's fields with ``auto_now_add`` change their value in this way. The row's shard has
        been chosen by the earlier value, so the row would be stored on the wrong shard.

        :raises ShardKeyRequired: ``pre_save()`` returns another key than that of ``instance``.
        """
        if not self._key_may_change_on_insert:
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
        """Return the shard of ``instance``, or None if it has no shard yet. Never chooses a shard.

        Usually, the shard key determines the shard. If the key is not generated yet, or if the
        model has no key, it is the shard of the row passed as ``near=``. Without ``near=``, it is
        the shard of a row of the same group to which ``instance`` refers.
        """
        if self.key is None or self.awaits_key(instance):
            return self._shard_of_relations(instance)
        return find_shard(instance, self.group, self.key_of(instance), runtime.locate)

    @cached_property
    def _foreign_key(self) -> Field[Any, Any] | None:
        """The foreign key to the global database whose values are the shard keys; None if there is none.

        It is either the shard key itself, or the foreign key at the end of a chain of foreign keys
        that begins with the shard key.
        """
        field: Any = self.key
        while field is not None and field.is_relation:
            if group_of(field.remote_field.model) is None:
                return cast("Field[Any, Any]", field)
            field = field.target_field
        return None

    def place_key(self, group: str, key: Any) -> Shard:
        """Return the shard of ``key`` in ``group``, the group of this model.

        If the key has no shard yet, choose a shard and record it.

        :raises DanglingShardKey: the key is new, and the row to which it refers does not exist.
        """
        shard = runtime.locate(group, key)
        return shard or runtime.shard(group, self._place_new([key])[key])

    def place_keys(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Return the shard number of each key, keyed by key.

        If a key has no shard yet, a shard is chosen and recorded, as in :meth:`place_key`.
        """
        numbers = runtime.strategy(self.group).locate_many(keys)
        placed = {key: number for key, number in numbers.items() if number is not None}
        return placed | self._place_new([key for key in numbers if key not in placed])

    def _place_new(self, keys: list[Any]) -> dict[Any, int]:
        strategy = runtime.strategy(self.group)
        self.refuse_dangling(keys)
        return strategy.place_new(keys)

    @property
    def checks_keys(self) -> bool:
        """Whether a new shard key must refer to an existing row of the global database."""
        if self._foreign_key is None or not runtime.strategy(self.group).places:
            return False
        return runtime.group(self.group).check_new_keys

    def refuse_dangling(self, keys: Sequence[Any]) -> None:
        """Raise an error if one of ``keys`` refers to a row that does not exist.

        Sends one query per 500 keys. Does nothing if :attr:`checks_keys` is false.
        """
        if self.checks_keys:
            refuse_dangling_keys(self.group, self._foreign_key, keys)

    def place(self, instance: Model, *, check_key: bool = True) -> Shard:
        """Return the shard on which ``instance`` is about to be stored.

        If its shard key has no shard yet, the group's strategy chooses a shard and records it.

        If the key is not generated yet, return the shard of the row passed as ``near=``. Without
        ``near=``, return the shard of a row of the same group to which ``instance`` refers. If
        there is no such row, draw one of the open shards at random. ``instance`` keeps the drawn
        shard until it is stored, unless no session can be opened to the shard's node.

        :param check_key: whether a new key that is a foreign key to the global database must refer
            to an existing row.
        :raises DanglingShardKey: the row to which a new key refers does not exist.
        :raises NoOpenShard: no shard is open for new keys.
        :raises UnplacedKey: the row passed as ``near=`` is on no shard yet.
        :raises InvalidShardKey: the shard key, or an id in a foreign key of ``instance``, is a
            value that no row can have.
        """
        shard = None
        if self.key is None or self.awaits_key(instance):
            shard = self._shard_of_relations(instance, for_write=True)
        if shard is not None:
            return shard
        if not self.awaits_key(instance):
            find = self.place_key if check_key else runtime.place
            placed = find_shard(instance, self.group, self.key_of(instance), find)
            assert placed is not None
            return placed
        state: Any = instance._state
        if (near := getattr(state, "near", None)) is not None:
            raise UnplacedKey(
                f"near={describe(near)} is on no shard of group {self.group!r} yet: save it first."
            )
        strategy = runtime.strategy(self.group)
        drawn: int | None = getattr(state, "drawn_shard", None)
        if drawn is not None:
            shard = runtime.shard(self.group, drawn)
            if strategy.node_failure(shard) is None:
                return shard
            # Draw another shard, because the node of the earlier one cannot be reached. An attempt to
            # store the row there may have failed already.
        drawn = state.drawn_shard = strategy.draw()
        return runtime.shard(self.group, drawn)

    def _shard_of_relations(self, instance: Any, *, for_write: bool = False) -> Shard | None:
        others = [getattr(instance._state, "near", None), *instance._state.fields_cache.values()]
        for other in others:
            alias = colocated_alias(self, other) if other is not None else None
            if alias is not None:
                return runtime.topology().resolve(alias)
        for field in self.model._meta.concrete_fields:
            value = instance.__dict__.get(field.attname)
            if hasattr(value, "resolve_expression"):
                continue  # Skip a value that the database computes: it determines no shard yet.
            if value is not None and self.names_shard(field):
                # ``value`` is the key of a row to which ``instance`` refers. In a group whose keys
                # must be placed, runtime.place() would choose a shard for this key, although its
                # row is not written now. So only look the key up there. In other groups, call
                # place() before a write, because it refuses an id that no row can have.
                must_exist = for_write and not runtime.strategy(self.group).places
                look_up = runtime.place if must_exist else runtime.locate
                return find_shard(instance, self.group, field.get_prep_value(value), look_up)
        return None


_options_by_model: dict[Any, ShardOptions | None] = {}


def shard_options(model: type[Any]) -> ShardOptions | None:
    """Return the group and shard key of ``model``, or None if its rows are in the global database.

    An automatic many-to-many table is in the group of the model that declares the relation.
    """
    try:
        return _options_by_model[model]
    except KeyError:
        return _options_by_model.setdefault(model, _read_shard_meta(model))


def required_options(model: type[Any]) -> ShardOptions:
    """Return the group and shard key of ``model``, which must be sharded."""
    options = shard_options(model)
    assert options is not None
    return options


def options_of(instance: Any) -> ShardOptions | None:
    """Return the group and shard key of the model of ``instance``; None if its rows are global.

    The model is ``instance.__class__``. ``type(instance)`` would be wrong for a lazy object such as
    ``request.user``.
    """
    return shard_options(instance.__class__)


def _read_shard_meta(model: Any) -> ShardOptions | None:
    meta = getattr(model, "_meta", None)
    if meta is None or meta.abstract:
        return None
    # Use getattr(), because ``model`` may lack attributes of a model: Django's database cache passes
    # a simple object instead of a model.
    if getattr(meta, "auto_created", False):
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
    return ShardOptions(model, group, key, bool(getattr(declared, "same_key", True)))


def group_of(model: type[Any]) -> str | None:
    """Return the name of the group of ``model``, or None if its rows are in the global database."""
    options = shard_options(model)
    return options.group if options is not None else None


def where_key(model: type[Any]) -> ShardKey | None:
    """Return the group of ``model`` and the columns whose values determine a row's shard.

    Return None if there is no such column, or if the model is not sharded.
    """
    options = shard_options(model)
    return options.where_key if options is not None else None


def target_field(field: Any) -> Any:
    """Return the field at the end of a chain of foreign keys.

    Return ``field`` itself if it is not a foreign key.
    """
    while field.is_relation:
        field = field.target_field
    return field


def describe(instance: Model) -> str:
    """Return a description of ``instance`` for an error message.

    Does not call ``__str__()``, which may send a query.
    """
    # Read __dict__ instead of the attribute: while Model.__init__() runs, the primary key may not
    # be set yet, and Django would try to load it. If ``instance`` is a lazy object such as
    # request.user, the model instance is in the attribute _wrapped.
    model: Any = instance.__class__
    row: Any = getattr(instance, "_wrapped", instance)
    values = [row.__dict__.get(field.attname) for field in model._meta.pk_fields]
    return f"{model.__name__}(pk={values[0] if len(values) == 1 else tuple(values)!r})"


def colocated_alias(options: ShardOptions, instance: Any) -> str | None:
    """Return the alias of the shard of ``instance`` if that shard is in the group of ``options``.

    Return None if ``instance`` is global, of another group, or not on a shard yet.
    """
    other = options_of(instance)
    if other is None or other.group != options.group:
        return None
    alias = instance._state.db
    if alias is not None and alias != options.group and not instance._state.adding:
        return current_alias(other, instance)
    # Read __dict__ instead of the attribute: while Model.__init__() runs, a relation may be set
    # before the shard key, and Django would send a query for the missing key, as for a deferred
    # field.
    if other.key is not None and instance.__dict__.get(other.key.attname) is None:
        return None
    shard = other.locate(instance)
    return shard.alias if shard is not None else None


def key_of_row_changed(row: Model, name: str, key: Any, new_key: Any) -> ShardKeyChanged:
    """Return the error to raise if a relation would set another shard key on a stored row.

    :param name: the name of the key's field or attribute.
    """
    return ShardKeyChanged(
        f"{describe(row)} has the shard key {name}={key!r} and cannot be given {new_key!r}. The key of"
        " a row never changes: create the row under the new key and delete this one."
    )


def shard_key_required(options: ShardOptions, problem: str) -> ShardKeyRequired:
    """Return the error for an operation whose shard is unknown. Its message lists the remedies.

    :param problem: what is wrong with the query, as a clause of the message.
    """
    name = options.model._meta.object_name
    if options.key is None:
        what = f"{name} is an automatic many-to-many table of group {options.group!r}"
        ways = f"filter by an instance of one side ({name}.objects.filter({options.relation_arguments[0]}))"
    else:
        key = options.key.name
        what = f"{name} is sharded by {key!r} in group {options.group!r}"
        ways = f"filter by it ({name}.objects.filter({key}=…))"
    return ShardKeyRequired(
        f"{what}, and {problem}: {ways}, name a shard with .using('{options.group}_00000'), or ask"
        " every shard on purpose with .scatter()."
    )
