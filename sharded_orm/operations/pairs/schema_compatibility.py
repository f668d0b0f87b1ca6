"""Decide which operations of migrations may run on the passive side of a pair first.

A rolling upgrade gives the passive side the new schema, while the active side still has the old
one. The passive side then executes the row events of the active side, that is, replicated changes
of single rows. Row events do not name columns. The server matches columns by position. If an event
has no value for a column, the column gets its default. If the column has no default, it gets 0 or
an empty text, without any error. So an operation is allowed only if rows of the old schema fit into
the new one. An operation for which this module has no rule is refused.

The opposite direction needs no rule: rows of the new schema are not executed on the side with the
old one.

This module sends no query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Field, GeneratedField, Value

from sharded_orm.operations.migrate.plan import Piece

_MODULES: Final = frozenset(
    f"django.db.migrations.operations.{module}" for module in ("fields", "models", "special")
)
#: The callables that a field may have as its default. They return an equal value at each call, so
#: both sides store the same value.
_CONSTANT_DEFAULTS: Final = (dict, list)

_PLAIN: Final = (
    "run that migration by 'manage.py migrate_shards' without --rolling: its statements are replicated"
    " in order with the rows"
)
_EXPAND: Final = (
    "add another column (null=True) with --rolling, deploy a release that writes both and fill the new"
    " one, deploy a release that uses only the new one, and then remove the old one by 'manage.py"
    " migrate_shards' without --rolling"
)
_CONTRACT: Final = (
    "deploy a release whose models do not have it (a migration with SeparateDatabaseAndState and only"
    f" state_operations), and when no other release runs, {_PLAIN}"
)


@dataclass(frozen=True)
class PlannedOperation:
    """An operation that runs on the shards.

    :param migration: the name of its migration, such as ``photos.0007_title``.
    """

    app_label: str
    migration: str
    piece: Piece


@dataclass(frozen=True)
class KeptDefault:
    """A new column that keeps its default in the database for some time.

    Releases that do not know the column insert rows without it. An operator has the default dropped
    when no such release runs any more.
    """

    app_label: str
    model: str
    field: str

    def __str__(self) -> str:
        return f"{self.app_label}.{self.model}.{self.field}"


@dataclass(frozen=True)
class Compatibility:
    """The result of :func:`examine`: which operations must not run on one side of a pair first.

    :param refusals: a sentence for each operation that must not, with the reason and an
        alternative; empty if all operations are allowed.
    :param kept_defaults: new columns that must keep their default in the database for now.
    """

    refusals: tuple[str, ...]
    kept_defaults: tuple[KeptDefault, ...]


def examine(operations: Iterable[PlannedOperation], *, stops_writes: bool = False) -> Compatibility:
    """Examine whether ``operations`` may run on one side of a pair while the other side has the
    old schema.

    They are examined in the order in which they run. None may run backwards.

    :param stops_writes: whether no row is written until both sides have the new schema. Then most
        operations are allowed. An operation is still refused, for example, if it would compute
        different values on the two sides.
    """
    rules = _STOPPED_RULES if stops_writes else _RULES
    refusals: list[str] = []
    kept: list[KeptDefault] = []
    created: set[tuple[str, str]] = set()
    added: set[tuple[str, str, str]] = set()
    for planned in operations:
        operation, label = planned.piece.operation, planned.app_label
        kind = type(operation).__name__
        model = str(getattr(operation, "model_name", getattr(operation, "name", ""))).lower()
        if type(operation).__module__ not in _MODULES:
            reason = _unknown(planned.piece, label)
        elif kind == "CreateModel":
            created.add((label, model))
            continue
        elif (label, model) in created and kind in _ON_NEW_TABLES:
            # The old schema does not have this table, so no row event of the old schema is about
            # it.
            continue
        else:
            reason = rules.get(kind, _unknown)(planned.piece, label)
            if kind == "AddField":
                added.add((label, model, operation.name))  # type: ignore[attr-defined]  # an AddField
            elif (
                kind == "AlterField"
                and not stops_writes
                and (label, model, operation.name) in added  # type: ignore[attr-defined]  # an AlterField
            ):
                reason = reason or _changed_again(planned.piece, label)
        if reason:
            refusals.append(f"{planned.migration}: {operation.describe()}: {reason}")
        elif kind == "AddField" and _keeps_default(operation.field):  # type: ignore[attr-defined]  # an AddField
            kept.append(KeptDefault(label, model, str(operation.name)))  # type: ignore[attr-defined]  # an AddField
    return Compatibility(tuple(refusals), tuple(kept))


# ##### Rules. A rule returns why the operation is refused, or "" if it is allowed. #####


def _allowed(piece: Piece, label: str) -> str:
    return ""


def _unknown(piece: Piece, label: str) -> str:
    return (
        f"it is not known what {type(piece.operation).__qualname__} does to rows that the other side writes"
        f" meanwhile. Instead, {_PLAIN}"
    )


def _per_side(piece: Piece, label: str) -> str:
    return (
        "it would run on each side, on rows of different moments, so the sides could differ."
        f" Instead, {_PLAIN}"
    )


def _dropped(piece: Piece, label: str) -> str:
    return (
        "the other side still sends rows with what is removed: values would come into wrong columns, or"
        f" replication would stop. Instead, {_CONTRACT}"
    )


def _renamed(piece: Piece, label: str) -> str:
    return (
        "releases with the old name fail on the side with the new one, and the other way round."
        " Instead, keep the name in the database (db_column, db_table); or create it anew:"
        f" {_EXPAND}"
    )


def _demanding(piece: Piece, label: str) -> str:
    return (
        "the other side still accepts rows that the new schema refuses: replication stops, or stores them"
        " all the same."
        f" Instead, {_PLAIN}"
    )


def _unique_together(piece: Piece, label: str) -> str:
    operation: Any = piece.operation
    options = piece.from_state.models[label, operation.name_lower].options
    before = set(options.get(operation.option_name) or ())
    return "" if set(operation.option_value or ()) <= before else _demanding(piece, label)


def _new_column(piece: Piece, label: str) -> str:
    field: Any = piece.operation.field  # type: ignore[attr-defined]  # an AddField
    if field.many_to_many:
        return ""  # A new table.
    if isinstance(field, GeneratedField):
        return (
            "rows of the old schema bring no value of a generated column. Instead, store the value:"
            f" {_EXPAND}"
        )
    if field.primary_key:
        return "replication finds rows by their primary key. Instead, create a new model"
    if field.unique and not (field.null and _lacks_default(field)):
        return (
            "all rows of the old schema would get the same value. Instead, add it with null=True and"
            " without a default, fill it when all releases write it, and then remove null=True by"
            " 'manage.py migrate_shards' without --rolling"
        )
    if not _is_constant(field):
        return (
            "its default is computed, so each side would store another value in the same row. Instead,"
            " add it with null=True and without a default in this migration, and fill it when all"
            " releases write it"
        )
    if not (field.null or field.has_db_default() or _keeps_default(field)):
        return (
            "it is NOT NULL without a default, so rows of the old schema would silently get 0 or an"
            " empty value. Instead, give it a default or null=True"
        )
    return ""


def _computed_column(piece: Piece, label: str) -> str:
    """The rule for AddField in an upgrade with ``--stop-writes``.

    No row is written until both sides have the new column, so it needs no default. But a primary
    key, a unique column in which all rows would get the same value, and a computed default are
    refused for the same reasons as by :func:`_new_column`.
    """
    field: Any = piece.operation.field  # type: ignore[attr-defined]  # an AddField
    if field.many_to_many or isinstance(field, GeneratedField):
        return ""
    is_repeated = field.unique and not (field.null and _lacks_default(field))
    if field.primary_key or is_repeated or not _is_constant(field):
        return _new_column(piece, label)
    return ""


def _computed_values(piece: Piece, label: str) -> str:
    """The rule for AlterField in an upgrade with ``--stop-writes``.

    No row is written until both sides have the changed column. So the change is refused only if
    each side would compute another value for rows with NULL.
    """
    operation: Any = piece.operation
    old: Any = piece.from_state.models[label, operation.model_name_lower].fields[operation.name]
    new: Any = operation.field
    if old.many_to_many or new.many_to_many or not old.null or new.null or _is_constant(new):
        return ""
    return (
        "rows with NULL get its default, which is computed, so each side would store another value in the"
        " same row. Instead, fill them first"
    )


def _is_constant(field: Any) -> bool:
    """Return whether the default of ``field`` is the same for each row, on both sides.

    For example, a default that is the current time is not constant.
    """
    if getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False):
        return False
    if field.has_db_default():
        expression = field.db_default
        return isinstance(expression, Value) or not hasattr(expression, "resolve_expression")
    return (
        not callable(field.default)
        or field.default in _CONSTANT_DEFAULTS
        or not field.has_default()
    )


def _lacks_default(field: Any) -> bool:
    return not field.has_db_default() and (not field.has_default() or field.default is None)


def _keeps_default(field: Any) -> bool:
    """Return whether a rolling upgrade must keep a default of the new column in the database.

    Django adds such a column with a default, and drops the default at once. But rows of the old
    schema bring no value for the column, so they need the default.
    """
    if field.many_to_many or field.has_db_default():
        return False
    if field.has_default():
        return field.default is not None
    return bool(not field.null and field.blank and field.empty_strings_allowed)


def _changed_column(piece: Piece, label: str) -> str:
    operation: Any = piece.operation
    old: Any = piece.from_state.models[label, operation.model_name_lower].fields[operation.name]
    new: Any = operation.field
    if old.many_to_many != new.many_to_many:
        return _dropped(piece, label)
    if old.db_column != new.db_column:
        return _renamed(piece, label)
    before, after = _database_part(old), _database_part(new)
    if new.null:
        # A column that takes NULL accepts every row of the old schema. So do not compare whether
        # the old column and the new one take NULL.
        before.pop("null", None)
        after.pop("null", None)
    if before.get("unique") and not after.get("unique"):
        before.pop("unique")
    elif after.get("unique") and not before.get("unique"):
        return _demanding(piece, label)
    if before == after:
        return ""
    if {**before, "null": None} == {**after, "null": None}:
        return _demanding(piece, label)
    return (
        f"replication stops at a value of the old type, or stores another one. Instead, {_EXPAND}"
    )


def _changed_again(piece: Piece, label: str) -> str:
    """The rule for AlterField of a column that the same upgrade has added to an older table.

    A change of the column's definition is refused. The statement for it would drop the column's
    default in the database, which the upgrade may have to keep; see :func:`_keeps_default`.
    """
    operation: Any = piece.operation
    old: Any = piece.from_state.models[label, operation.model_name_lower].fields[operation.name]
    new: Any = operation.field
    if _database_part(old) == _database_part(new) and old.db_comment == new.db_comment:
        return ""
    # Django sends ALTER TABLE … MODIFY without the default, which drops the default.
    return (
        "the new column would lose its default in the database, and rows of the old schema would get"
        " another value on each side. Instead, write this into AddField; or upgrade to the migration"
        " before this one, and then to this one"
    )


def _database_part(field: Field[Any, Any]) -> dict[str, Any]:
    """Return the parts of ``field`` that decide how its column stores values.

    Indexes, comments, and defaults in Python are left out.
    """
    _, path, arguments, keywords = field.deconstruct()
    left_out = {*field.non_db_attrs, "default", "db_index", "db_comment"}
    kept = {name: value for name, value in keywords.items() if name not in left_out}
    return {"path": path, "arguments": list(arguments), **kept}


_RULES: Final[dict[str, Callable[[Piece, str], str]]] = {
    **dict.fromkeys(
        (
            "AddIndex", "RemoveIndex", "RenameIndex", "AlterIndexTogether", "RemoveConstraint",
            "AlterConstraint", "AlterModelOptions", "AlterModelManagers", "AlterModelTableComment",
        ),
        _allowed,
    ),
    **dict.fromkeys(("RunPython", "RunSQL"), _per_side),
    **dict.fromkeys(("RemoveField", "DeleteModel"), _dropped),
    **dict.fromkeys(("RenameField", "RenameModel", "AlterModelTable"), _renamed),
    "AddConstraint": _demanding,
    "AlterUniqueTogether": _unique_together,
    "AddField": _new_column,
    "AlterField": _changed_column,
}  # fmt: skip
_STOPPED_RULES: Final[dict[str, Callable[[Piece, str], str]]] = {
    **dict.fromkeys(_RULES, _allowed),
    **dict.fromkeys(("RunPython", "RunSQL"), _per_side),
    "AddField": _computed_column,
    "AlterField": _computed_values,
}
# Operations that are allowed without a check if an earlier operation of the same upgrade has
# created the table, because the old schema has no rows of it.
_ON_NEW_TABLES: Final = frozenset(
    {
        "AddField", "AlterField", "RemoveField", "AddConstraint", "RemoveConstraint", "AddIndex",
        "RemoveIndex", "AlterUniqueTogether", "AlterIndexTogether", "AlterModelOptions",
    }
)  # fmt: skip
