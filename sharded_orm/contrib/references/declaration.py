"""The reference models of the project. Their rows are in the global database, and each shard has a
copy of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from django.apps import apps
from django.db.models import (
    CASCADE,
    DO_NOTHING,
    PROTECT,
    RESTRICT,
    CompositePrimaryKey,
    ForeignKey,
    GeneratedField,
    Model,
)

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Source
from sharded_orm.contrib.references.exceptions import ReferenceModelNotFound
from sharded_orm.contrib.references.models import ReferenceModel
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.topology.model import Shard


@dataclass(frozen=True, eq=False)
class ReferenceSource(Source):
    """Describes a reference model to the code that records the writes of models.

    This code was made for mirrors, where a model with read-only copies is called a source. So a
    reference model is described as a source. It has no shard key, so :attr:`key` is its primary
    key.
    """

    what: ClassVar[str] = "is a reference table"

    @property
    def key(self) -> Any:
        return self.pk

    @property
    def keeps_values(self) -> bool:
        return False

    def epoch_of(self, key: Any) -> int:
        return 0


def reference_models() -> list[type[ReferenceModel]]:
    """Return the installed reference models. A model comes before models with foreign keys to it."""
    chosen = [
        model
        for model in apps.get_models()
        if issubclass(model, ReferenceModel) and not model._meta.proxy
    ]
    ordered: list[type[ReferenceModel]] = []
    visited: set[type[Model]] = set()

    def visit(model: Any) -> None:
        if model in visited:
            return
        visited.add(model)
        for field in model._meta.local_concrete_fields:
            if field.is_relation and field.related_model in chosen:
                visit(field.related_model)
        ordered.append(model)

    for model in sorted(chosen, key=lambda model: model._meta.label):
        visit(model)
    return ordered


def find_model(name: str) -> type[ReferenceModel] | None:
    """Return the reference model with this label or class name; None if there is none.

    :raises ReferenceModelNotFound: several models have this class name.
    """
    matching = [
        model
        for model in reference_models()
        if name.lower() in (model._meta.label_lower, model.__name__.lower())
    ]
    if len(matching) > 1:
        labels = sorted(model._meta.label for model in matching)
        raise ReferenceModelNotFound(f"Several reference tables are called {name!r}: {labels!r}.")
    return matching[0] if matching else None


def groups() -> list[str]:
    """Return the names of all shard groups, because the shards of each group have copies."""
    return sorted(runtime.topology().groups)


def shards() -> Iterator[Shard]:
    """Yield the shards that have copies."""
    for group in groups():
        yield from runtime.group(group).shards()


def copied_fields(model: Any) -> list[Any]:
    """Return the fields that copies have: all but generated ones."""
    return [f for f in model._meta.local_concrete_fields if not isinstance(f, GeneratedField)]


def columns_digest(model: Any) -> str:
    """Return a hash of the names of the copied columns.

    The last update of the copies has stored such a hash. If the hash is different now, the running
    code copies other columns than the copies have.
    """
    columns = "\0".join(sorted(f.column for f in copied_fields(model)))
    return sha256(columns.encode()).hexdigest()


def problems_of(model: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the reasons why the reference model ``model`` cannot have copies.

    :returns: triples (id of a system check, sentence, field or model that is at fault).
    """
    children = [r for r in model._meta.related_objects if getattr(r, "parent_link", False)]
    if model._meta.parents or children:
        yield "E002", "It shares its rows with another table. Use an abstract base class.", model
    if isinstance(model._meta.pk, CompositePrimaryKey) or model._meta.pk.is_relation:
        yield (
            "E003",
            "Its primary key consists of other keys. Give it a primary key of its own.",
            model,
        )
    for field in model._meta.local_concrete_fields:
        if isinstance(field, ForeignKey):
            yield from _own_reference_problems(field)
    for relation in model._meta.related_objects:
        field = relation.field
        if isinstance(field, ForeignKey) and shard_options(field.model) is not None:
            yield from _reference_problems(field)


def _own_reference_problems(field: Any) -> Iterator[tuple[str, str, Any]]:
    if not issubclass(field.related_model, ReferenceModel):
        if field.db_constraint:
            yield (
                "E004",
                f"The foreign key {field.name!r} has a constraint, and the shards have no copies of"
                f" {field.related_model._meta.label}. Make that a reference model, or set"
                " db_constraint=False.",
                field,
            )
        return
    on_delete = field.remote_field.on_delete
    if on_delete is CASCADE and field.null and field.related_model is not field.model:
        yield (
            "E005",
            f"The foreign key {field.name!r} has on_delete=CASCADE and may be NULL, so Django deletes in an order"
            " in which the copies cannot follow. Use PROTECT, or null=False.",
            field,
        )
    if on_delete not in (CASCADE, PROTECT, RESTRICT, DO_NOTHING):
        yield (
            "E005",
            f"on_delete of {field.name!r} changes rows in the transaction that deletes others, and the copies"
            " of the deleted rows go first. Use PROTECT or CASCADE, and change the rows yourself before.",
            field,
        )


def _reference_problems(field: Any) -> Iterator[tuple[str, str, Any]]:
    if not field.db_constraint:
        yield (
            "E006",
            f"The foreign key {field.name!r} of {field.model._meta.label} has db_constraint=False. A join"
            " would lose rows whose reference row is not copied yet. Leave it out.",
            field,
        )
    if not field.target_field.primary_key:
        yield (
            "E007",
            f"The foreign key {field.name!r} of {field.model._meta.label} refers to"
            f" {field.target_field.name!r}, which may change. Refer to the primary key.",
            field,
        )
