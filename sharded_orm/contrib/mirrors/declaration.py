"""The declarations of mirrors in ``ShardMeta``: :class:`Mirror` and :class:`Source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, FieldError, ImproperlyConfigured
from django.db.models import (
    AutoField,
    BinaryField,
    CompositePrimaryKey,
    F,
    FileField,
    ForeignKey,
    GeneratedField,
    IntegerField,
    JSONField,
    Model,
    Q,
)
from django.db.models.sql import Query

from sharded_orm import compat, runtime
from sharded_orm.contrib.mirrors.exceptions import InvalidMirror
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field


def text_of(field: Any, value: Any) -> str:
    """Return a primary key or shard key as text, as the outbox and the table of versions store it."""
    return str(target_field(field).get_prep_value(value))


def value_of(field: Any, text: str) -> Any:
    """Return the primary key or shard key that :func:`text_of` has turned into ``text``."""
    return target_field(field).to_python(text)


@dataclass(frozen=True, eq=False)
class Mirror:
    """A model whose rows are copies of rows of another model, sharded by a different key.

    :param fields: pairs (field of the mirror, field of the source from which it is copied).
    :param key: the field of the source whose values are the shard keys of the mirror, such as
        ``author_id``.
    :param condition: the condition that selects the rows to copy; None for all rows.
    """

    model: type[Model]
    source: Source
    fields: tuple[tuple[Any, Any], ...]
    key: Any
    condition: Q | None
    verify_reads: bool

    @property
    def label(self) -> str:
        return self.model._meta.label

    @property
    def options(self) -> ShardOptions:
        options = shard_options(self.model)
        assert options is not None
        return options

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The attributes of the source that are copied, in the order of :attr:`fields`."""
        return tuple(original.attname for _, original in self.fields)

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        """The attributes of the mirror that hold the copied values, in the order of :attr:`fields`."""
        return tuple(own.attname for own, _ in self.fields)

    @cached_property
    def json_positions(self) -> tuple[int, ...]:
        """The positions of JSON fields in :attr:`fields`, such as ``(2,)`` if the third is a JSON
        field.
        """
        return tuple(n for n, (own, _) in enumerate(self.fields) if isinstance(own, JSONField))

    @cached_property
    def own_source_key(self) -> Any:
        """The field of the mirror that copies the source's shard key; None if the mirror lacks it."""
        return next((own for own, original in self.fields if original is self.source.key), None)

    def has_moved(self, key: Any) -> bool:
        """Whether ``key``, a shard key of the mirror, has ever moved to another shard."""
        strategy, own = runtime.strategy(self.options.group), self.options.key
        assert own is not None
        return strategy.moves_keys and strategy.version(own.get_prep_value(key)) > 0


@dataclass(frozen=True, eq=False)
class Source:
    """A model that has mirrors.

    :cvar what: the words with which error messages describe such a model.
    """

    model: type[Model]
    mirrors: list[Mirror] = field(default_factory=list)
    what: ClassVar[str] = "has mirrors"

    @property
    def label(self) -> str:
        return self.model._meta.label_lower

    @property
    def options(self) -> ShardOptions:
        options = shard_options(self.model)
        assert options is not None
        return options

    @property
    def key(self) -> Any:
        return self.options.key

    @property
    def pk(self) -> Any:
        return self.model._meta.pk

    def epoch_of(self, key: Any) -> int:
        """Return a number that grows each time ``key`` moves to another shard; 0 if keys do not move."""
        strategy = runtime.strategy(self.options.group)
        return strategy.version(self.key.get_prep_value(key)) if strategy.moves_keys else 0

    @cached_property
    def copied(self) -> frozenset[str]:
        """The names of the source's attributes that at least one of its mirrors copies."""
        return frozenset(name for mirror in self.mirrors for name in mirror.names)

    @cached_property
    def keeps_values(self) -> bool:
        """Whether a delivery can take the values of a new row from the instance that was inserted,
        so that it need not read the row.

        False if the stored value may differ from the attribute of the instance. This may be so with
        a field class of the project, or with a value that can be changed in place before the
        commit, such as a dict.
        """
        kinds = {type(f) for f in self.model._meta.concrete_fields if f.attname in self.copied}
        return all(
            kind.__module__.startswith(("django.db.models.fields", "sharded_orm.models.fields"))
            and not issubclass(kind, BinaryField | FileField | GeneratedField | JSONField)
            for kind in kinds
        )

    @cached_property
    def mirror_keys(self) -> tuple[Any, ...]:
        """The fields of the source that are the shard key of at least one mirror, without
        repetition.
        """
        return tuple(dict.fromkeys(mirror.key for mirror in self.mirrors))


Declarations = Mapping[type[Model], "Source | Mirror"]
_declared: Declarations | None = None


def declarations() -> Declarations:
    """Return a dict that maps each source to its :class:`Source`, and each mirror to its
    :class:`Mirror`.

    Contains all installed models of these two kinds.

    :raises InvalidMirror: a declaration is wrong.
    """
    global _declared
    if _declared is None:
        declared: dict[type[Model], Source | Mirror] = {}
        for model in declared_mirrors():
            if problems := list(problems_of(model)):
                raise InvalidMirror(
                    f"{model._meta.label}.ShardMeta declares a mirror that cannot be kept: "
                    + "; ".join(text for _, text in problems)
                )
            mirror = _mirror(model, declared)
            declared[model] = mirror
        if not apps.models_ready:
            return declared
        _declared = declared
    return _declared


def forget() -> None:
    """Forget the results of :func:`declarations`, for example after the installed apps have changed."""
    global _declared
    _declared = None


def source_of(label: str) -> Source | None:
    """Return the source with this label; None if the model is gone or has no mirrors any more."""
    try:
        declared = declarations().get(apps.get_model(label))
    except LookupError:
        return None
    return declared if isinstance(declared, Source) else None


def mirrors() -> list[Mirror]:
    """Return all mirrors, in the order of their labels."""
    found = [declared for declared in declarations().values() if isinstance(declared, Mirror)]
    return sorted(found, key=lambda mirror: mirror.label)


def sources() -> list[Source]:
    """Return all models that have mirrors."""
    return [declared for declared in declarations().values() if isinstance(declared, Source)]


def declared_mirrors() -> list[type[Model]]:
    """Return the installed models whose ``ShardMeta`` has ``mirror_of``, without proxies."""
    return [
        model
        for model in apps.get_models()
        if not model._meta.proxy and _declared_source(model) is not None
    ]


def _declared_source(model: Any) -> Any:
    return getattr(getattr(model, "ShardMeta", None), "mirror_of", None)


def _source_model(model: Any) -> Any:
    named = _declared_source(model)
    if isinstance(named, str):
        label = named if "." in named else f"{model._meta.app_label}.{named}"
        return apps.get_model(label)._meta.concrete_model
    return named._meta.concrete_model


def _mirror(model: type[Model], declared: dict[type[Model], Source | Mirror]) -> Mirror:
    original = _source_model(model)
    source = declared.setdefault(original, Source(original))
    assert isinstance(source, Source)
    meta: Any = getattr(model, "ShardMeta", None)
    options = shard_options(model)
    assert options is not None and options.key is not None
    pairs = tuple(
        (own, _field(original, own.attname))
        for own in model._meta.concrete_fields
        if not isinstance(own, GeneratedField | CompositePrimaryKey)
    )
    mirror = Mirror(
        model,
        source,
        pairs,
        next(theirs for own, theirs in pairs if own is options.key),
        getattr(meta, "condition", None),
        bool(getattr(meta, "verify_reads", False)),
    )
    source.mirrors.append(mirror)
    return mirror


def _field(model: Any, attname: str) -> Any:
    return next((f for f in model._meta.concrete_fields if f.attname == attname), None)


def problems_of(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the errors in the declaration of the mirror ``model``, as pairs (id of the system
    check, sentence), such as ``("E001", "…")``.
    """
    try:
        source = _source_model(model)
    except (LookupError, ValueError, AttributeError):
        yield "E001", f"mirror_of names {_declared_source(model)!r}, which is no installed model"
        return
    label = source._meta.label
    try:
        own, theirs = shard_options(model), shard_options(source)
    except ImproperlyConfigured as exc:
        yield "E001", str(exc)
        return
    if own is None or own.key is None:
        yield "E001", "the model is not a ShardedModel with group and shard_key"
        return
    if theirs is None or theirs.key is None:
        yield "E001", f"its source {label} is not a sharded model with a shard key"
        return
    if _declared_source(source) is not None:
        yield "E002", _mirror_of_mirror(model, source)
        return
    yield from _inheritance_problems(model, source)
    yield from _key_problems(source)
    yield from _field_problems(model, source)
    yield from _condition_problems(model, source)
    yield from _database_problems(source)
    verifies = getattr(model.ShardMeta, "verify_reads", False)
    if not isinstance(verifies, bool):
        yield "E008", f"verify_reads is {verifies!r}; it must be True or False"
    elif verifies and _field(model, theirs.key.attname) is None:
        yield (
            "E008",
            f"verify_reads needs the field {theirs.key.attname!r}, the shard key of the source {label}:"
            " the row of the source is looked up by it",
        )


def _database_problems(source: Any) -> Iterator[tuple[str, str]]:
    for column in source._meta.local_fields:
        on_delete: Any = getattr(column.remote_field, "on_delete", None)
        if compat.changes_rows_unseen(on_delete):
            yield (
                "E009",
                f"with on_delete={on_delete.__name__} of {column.name!r}, the database itself changes rows"
                f" of the source {source._meta.label}, and the mirror does not learn of it. Use CASCADE,"
                " SET_NULL or the like",
            )


def _mirror_of_mirror(model: Any, source: Any) -> str:
    chain = [model, source]
    while _declared_source(chain[-1]) is not None:
        following = _source_model(chain[-1])
        if following in chain:
            names = " -> ".join(m._meta.label for m in [*chain, following])
            return f"mirrors mirror one another in a circle ({names}), so no model has the truth"
        chain.append(following)
    return f"its source {source._meta.label} is itself a mirror. Mirror {chain[-1]._meta.label} instead"


def _inheritance_problems(model: Any, source: Any) -> Iterator[tuple[str, str]]:
    for side in (model, source):
        children = [
            relation.related_model._meta.label
            for relation in side._meta.related_objects
            if getattr(relation, "parent_link", False)
        ]
        if side._meta.parents or children:
            yield (
                "E003",
                f"{side._meta.label} shares its rows with another table (multi-table inheritance:"
                f" {', '.join([p._meta.label for p in side._meta.parents] + children)}). Use an"
                " abstract base class",
            )


def _key_problems(source: Any) -> Iterator[tuple[str, str]]:
    pk = source._meta.pk
    label = source._meta.label
    if isinstance(pk, AutoField | CompositePrimaryKey) or pk.is_relation:
        yield (
            "E004",
            f"the primary key {pk.name!r} of the source {label} is not unique over all shards by"
            " itself. Use an id that is, such as a TicketField or a UUIDField",
        )
    elif not type(pk).pre_save.__module__.startswith(("django.", "sharded_orm.")):
        yield (
            "E004",
            f"the primary key {pk.name!r} of the source {label} has a pre_save() of its own, so its"
            " stored value is not known",
        )


def _field_problems(model: Any, source: Any) -> Iterator[tuple[str, str]]:
    label, pk = source._meta.label, source._meta.pk
    if model._meta.pk.attname != pk.attname:
        yield (
            "E004",
            f"its primary key is {model._meta.pk.attname!r}. It must be that of the source,"
            f" {pk.attname!r}, so that a row of the mirror has one source",
        )
    for own in model._meta.concrete_fields:
        if isinstance(own, GeneratedField):
            continue
        original = _field(source, own.attname)
        if original is None:
            yield "E005", f"its field {own.attname!r} is no field of the source {label}"
            continue
        if target_field(own).get_internal_type() != target_field(
            original
        ).get_internal_type() and not _same_integers(own, original):
            yield (
                "E005",
                f"its field {own.attname!r} is a {type(target_field(own)).__name__}, and that of the"
                f" source {label} is a {type(target_field(original)).__name__}",
            )
        if getattr(own, "auto_now", False) or getattr(own, "auto_now_add", False):
            yield "E005", f"its field {own.name!r} has auto_now: the value comes from the source"
        if isinstance(own, ForeignKey) and getattr(own, "db_constraint", False):
            yield (
                "E006",
                f"its foreign key {own.name!r} has a constraint, but the row that it refers to may be"
                " elsewhere or not be there yet. Give it db_constraint=False, or declare it as a plain"
                f" field {own.attname!r}",
            )


def _same_integers(own: Any, original: Any) -> bool:
    """Whether both fields store integers, although their classes may differ, such as
    ``TicketField`` and ``BigIntegerField``.
    """
    return isinstance(target_field(own), IntegerField) and isinstance(
        target_field(original), IntegerField
    )


def _condition_problems(model: Any, source: Any) -> Iterator[tuple[str, str]]:
    condition = getattr(model.ShardMeta, "condition", None)
    if condition is None:
        return
    if not isinstance(condition, Q):
        yield "E007", f"condition is {condition!r}; it must be a Q object"
        return
    if any(not _is_local(child) for child in _children(condition)):
        yield (
            "E007",
            f"condition {condition!r} has an expression. Compare fields of the source with values, or"
            " with F() of its own fields: a mirror does not notice that anything else changes",
        )
        return
    query = Query(source)
    try:
        query.add_q(condition)
    except (FieldError, FieldDoesNotExist) as exc:
        yield "E007", f"condition {condition!r} cannot be used: {exc}"
        return
    if len(query.alias_map) > 1:
        yield (
            "E007",
            f"condition {condition!r} reads other tables. Use fields of the source alone: a mirror does"
            " not notice that rows of other tables change",
        )


def _children(condition: Q) -> Iterator[Any]:
    for child in condition.children:
        if isinstance(child, Q):
            yield from _children(child)
        else:
            yield child


def _is_local(child: Any) -> bool:
    if not isinstance(child, tuple):
        return False
    _, value = child
    values = value if isinstance(value, list | tuple | set) else [value]
    return all(isinstance(v, F) or not hasattr(v, "resolve_expression") for v in values)
