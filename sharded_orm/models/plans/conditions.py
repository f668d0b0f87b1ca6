"""The conditions of ``filter()`` and ``exclude()`` calls, without their values, for plans.

A plan is SQL that was compiled once, to be used for all queries that differ only in the values of
their conditions. That is possible only if the SQL does not depend on these values. This module
decides for which conditions that is so. It leaves all other conditions to Django.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db.models import (
    BooleanField,
    DateField,
    DateTimeField,
    GeneratedField,
    GenericIPAddressField,
    JSONField,
    Model,
    lookups,
)
from django.db.models.constants import LOOKUP_SEP
from django.db.models.fields import related_lookups

from sharded_orm.models.sharding.instance_shard import frozen
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.query import own_columns

MODULES_OF_LOOKUPS = (lookups.__name__, related_lookups.__name__)

# The types of values on which the SQL of a condition does not depend. Their subclasses, such as
# IntegerChoices, are excluded. Each type is mapped to a function that makes an example value of the
# type from a number. Different numbers give different values. For the numbers that example_number()
# returns, none of them equals True or False, as the int 1 would.
_EXAMPLES: dict[type, Callable[[int], Any]] = {
    int: lambda number: number + 1,
    str: lambda number: str(number + 1),
    UUID: lambda number: UUID(int=number),
    date: lambda number: date(2000, 1, 1) + timedelta(number),
    datetime: lambda number: (
        datetime(2000, 1, 1, tzinfo=UTC if settings.USE_TZ else None) + timedelta(number)
    ),
}
#: The types of values that :func:`kind_of` maps to themselves.
KINDS_BY_TYPE = frozenset(_EXAMPLES) - {datetime}
_COMPARISONS = frozenset({"exact", "gt", "gte", "lt", "lte"})
_LISTS = frozenset({list, tuple, set, frozenset})
# The modules of fields whose conditions can have plans. Fields of other packages are excluded,
# because the SQL of their conditions may depend on the value.
_MODULES_OF_FIELDS = ("django.db.models.fields", "sharded_orm.models.fields.")


class ValueForm(Enum):
    """How the value of a condition becomes parameters of the SQL."""

    #: One parameter.
    VALUE = "value"
    #: One parameter for each distinct value of a list.
    LIST = "list"
    #: The SQL depends on the value, which is None or a bool. So the value is a part of the shape of
    #: the query.
    FIXED = "fixed"


class Condition(NamedTuple):
    """A condition of a query: a column is compared with a value.

    :param field: the field of the column.
    :param target: the field that prepares the value. This is ``field`` itself; for a foreign key,
        it is the field to which the key refers.
    :param lookup: the name of the comparison, such as ``"exact"``.
    :param names_shard: whether the condition determines the shard: it is an equality with the shard
        key, or with an id that contains the number of its shard.
    :param form: how the value becomes parameters.
    :param is_excluded: whether a row can match without meeting the condition. True in
        ``exclude()``, and in a ``Q`` below NOT or in an OR of several parts.
    :param takes_instance: whether the value is a model instance, as in ``filter(album=album)``.
    :param names_instance: whether the query must go to the shard of this instance, because the
        value of the foreign key does not tell the shard.
    :param repeats: the position of an earlier condition on the same column, if both determine the
        shard; otherwise None. The two must then have the same value.
    """

    field: Any
    target: Any
    lookup: str
    names_shard: bool = False
    form: ValueForm = ValueForm.VALUE
    is_excluded: bool = False
    takes_instance: bool = False
    names_instance: bool = False
    repeats: int | None = None

    def frozen(self, value: Any) -> Any:
        """Return what to record of ``value``, so that later changes by the caller have no effect.

        For a list, return a copy. For a model instance, return the value to which the foreign key
        refers, or a copy of the instance if ``names_instance`` is True. Return any other value
        unchanged.
        """
        if self.form is ValueForm.LIST:
            return list(value)
        if not self.takes_instance:
            return value
        if not self.names_instance:
            return getattr(value, self.target.attname)
        # ``value`` is a model instance. The query needs the value to which the foreign key refers,
        # and also the shard of the instance. So copy the whole instance.
        return frozen(value)

    def prepared(self, value: Any) -> Any:
        """Return ``value`` prepared for the database, as Django's lookup prepares it.

        :param value: a value that :meth:`frozen` has returned.
        :raises Exception: the field does not accept the value. Django raises the same error.
        """
        prepare = self.target.get_prep_value
        if self.names_instance:
            value = getattr(value, self.target.attname)
        if self.form is ValueForm.VALUE:
            return prepare(value)
        if self.form is ValueForm.LIST:
            # In.process_rhs() drops values that occur twice.
            return tuple(dict.fromkeys(map(prepare, value)))
        return value is None or value  # ``= None`` is IS NULL: the lookup isnull with True.

    def example(self, prepared: Any, number: int, length: int) -> Any:
        """Return a made-up value of the same type as ``prepared``, for an example query.

        Return None if the SQL may depend on values of this type.

        :param prepared: a prepared value of this condition.
        :param number: determines the made-up value. Different numbers give different values. The
            values of a list are made from ``number`` and the numbers after it.
        :param length: the number of values in a list.
        """
        if self.form is ValueForm.FIXED:
            return prepared
        if self.form is ValueForm.VALUE:
            make = _EXAMPLES.get(type(prepared))
            if self.repeats is not None:
                number = example_number(self.repeats)
            return None if make is None else make(number)
        kinds = set(map(type, prepared))
        make = _EXAMPLES.get(kinds.pop()) if len(kinds) == 1 else None
        return None if make is None else tuple(map(make, range(number, number + length)))


def example_number(position: int) -> int:
    """Return the ``number`` for :meth:`Condition.example` of the condition at ``position``.

    The numbers of neighbouring positions are 10 apart. So even if a condition compares with a list,
    and takes several numbers, no two conditions get the same example value.
    """
    return position * 10 + 1


def with_repeated_key(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return ``conditions`` with the attribute ``repeats`` set on repeated shard keys.

    In ``user.photos.filter(user_id=1)``, for example, the related manager adds a condition on the
    shard key, and the call of ``filter()`` repeats it.
    """
    marked: list[Condition] = []
    first: dict[str, int] = {}
    for position, part in enumerate(conditions):
        if part.names_shard:
            earlier = first.setdefault(part.field.column, position)
            part = part._replace(repeats=earlier if earlier < position else None)
        marked.append(part)
    return tuple(marked)


def kind_of(value: Any) -> Any:
    """Return what stands for the value of a condition in the shape of a query.

    This is usually the type of the value. For a list such as ``[1, 2]``, it is ``(list, int)``.
    None, True and False stand for themselves, because the SQL depends on them.
    """
    kind = type(value)
    if kind in _EXAMPLES:
        # Give times with and without a time zone different shapes. If USE_TZ is on, Django warns
        # when it prepares a time without a time zone. A plan gives no warning, so it must not be
        # used for such times.
        return kind if kind is not datetime else (kind, value.tzinfo is None)
    if value is None or kind is bool:
        return value
    if kind in _LISTS:
        kinds = set(map(type, value))
        if len(kinds) == 1:
            return (list, kinds.pop())
    return kind


def condition_of(
    model: Any, options: ShardOptions | None, name: str, value: Any, *, is_excluded: bool
) -> Condition | None:
    """Return the condition ``name=value`` of ``filter()`` or ``exclude()``.

    Return None if Django must handle the condition, because its SQL may depend on the value.

    :param options: the group and shard key of ``model``; None if it is not sharded.
    """
    column, _, lookup = name.partition(LOOKUP_SEP)
    lookup = lookup or "exact"
    field = own_columns(model).get(column) or _foreign_key(model, column)
    if field is None or (field.is_relation and lookup not in ("exact", "in", "isnull")):
        return None
    target = field.target_field if field.is_relation else field
    if not all(type(part).__module__.startswith(_MODULES_OF_FIELDS) for part in (field, target)):
        return None
    if isinstance(target, GeneratedField | JSONField | GenericIPAddressField):
        # Let Django handle the condition, because the SQL may depend on the type of the value, or
        # because a field of another package may prepare the value.
        return None
    part = Condition(field, target, lookup, is_excluded=is_excluded)
    named = _with_form(part, options, name, value)
    if named is None or field.get_lookup(named.lookup).__module__ not in MODULES_OF_LOOKUPS:
        return None  # Leave a custom lookup of a project to Django, because it may refuse values.
    # Find out whether the condition is an equality that determines the shard. The rule is the same
    # as that of plain_key() in sharded_orm.models.querysets.route.
    if options is None or not (field is options.key or field.column in options.columns):
        return named
    if is_excluded or named.form is not ValueForm.VALUE:
        return None  # Such a condition on the shard key may be one that no row meets.
    names_shard = field is options.key or options.names_shard(field)
    return named._replace(names_shard=names_shard and lookup == "exact")


def _with_form(
    part: Condition, options: ShardOptions | None, name: str, value: Any
) -> Condition | None:
    kind = type(value)
    if part.lookup == "in":
        kinds = set(map(type, value)) if kind in _LISTS else set()
        if len(kinds) != 1 or datetime in kinds or not _accepts(part.target, kinds.pop(), None):
            return None
        return part._replace(form=ValueForm.LIST)
    if part.lookup == "isnull":
        return part._replace(form=ValueForm.FIXED) if kind is bool else None
    if part.lookup == "exact" and value is None:
        return part._replace(form=ValueForm.FIXED, lookup="isnull")
    if part.lookup == "exact" and kind is bool:
        return part._replace(form=ValueForm.FIXED) if type(part.target) is BooleanField else None
    if issubclass(kind, Model):  # Not isinstance(): a lazy object seems to be an instance.
        if part.lookup != "exact" or not _refers_to(part, name, kind):
            return None
        # The value of the condition is a model instance, as in filter(album=album). If its id does
        # not determine the shard, ShardedQuery sends the query to the shard of this instance. The
        # recording must then keep the instance, and not only its id.
        is_sharded = options is not None and shard_options(kind) is not None
        names_instance = is_sharded and not options.names_shard(part.field)  # type: ignore[union-attr]  # not None if sharded
        if names_instance and part.is_excluded:
            return None
        return part._replace(takes_instance=True, names_instance=names_instance)
    if part.lookup in _COMPARISONS and _accepts(part.target, kind, value):
        return part
    return None


def _accepts(target: Any, kind: type, value: Any) -> bool:
    if isinstance(target, DateTimeField):
        # Django warns if USE_TZ is on and the time has no time zone. Leave such times to Django.
        return kind is datetime and (value.tzinfo is None) is not settings.USE_TZ
    if kind is date:
        return type(target) is DateField
    return kind in _EXAMPLES and kind is not datetime


def _refers_to(part: Condition, name: str, kind: Any) -> bool:
    """Whether ``name`` is that of a foreign key that refers to the model ``kind``.

    The name must be that of the field, such as ``album``, and not its attname ``album_id``.
    """
    field, referred = part.field, part.target.model._meta
    return (
        field.is_relation
        and name == field.name
        and kind._meta.concrete_model is referred.concrete_model
    )


def _foreign_key(model: Any, name: str) -> Any:
    """Return the foreign key of the model's own table whose name or attname is ``name``."""
    meta = model._meta
    for field in meta.concrete_fields:
        if (
            field.is_relation
            and name in (field.name, field.attname)
            and field.model._meta.concrete_model is meta.concrete_model
            and len(field.foreign_related_fields) == 1
            and not field.target_field.is_relation
        ):
            return field
    return None


def fields_of(model: Any, names: Iterable[str]) -> list[Any] | None:
    """Return the fields with these names; None if one is not a field of the model's own table."""
    columns = own_columns(model)
    fields = [columns.get(name) or _foreign_key(model, name) for name in names]
    return None if None in fields else fields
