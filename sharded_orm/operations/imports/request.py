"""The request for an import, and the report on its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import ForeignKey, Model

from sharded_orm.models.sharding.options import group_of
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports.source_tables import SourceTable
from sharded_orm.operations.shards.where import sharded_model

#: Default number of rows in a range of primary keys, the unit of work.
ROWS = 10_000


@dataclass(frozen=True)
class ImportRequest:
    """A request to import tables, all of one group, from an unsharded database into the shards.

    :param tables: the tables. Each comes after the tables to which it refers.
    :param group: the name of the group.
    :param source: the alias of the database with the rows.
    :param update: what to do if a row is already on its shard, but with values that differ from
        those on the source. True overwrites the row; False keeps it and reports it.
    :param rows: number of rows in a range of primary keys, the unit of work.
    :param rounds: the largest number of rounds. Each round goes through all tables once. Another
        round follows if the last one has copied or updated rows.
    """

    tables: Sequence[SourceTable]
    group: str
    source: str
    update: bool = False
    rows: int = ROWS
    rounds: int = 10

    @classmethod
    def of_labels(cls, labels: Sequence[str], source: str, **options: Any) -> ImportRequest:
        """Return a request to import the models in ``labels`` and their many-to-many tables.

        :param labels: names of models, such as ``photos.Photo``.
        :param options: other parameters of :class:`ImportRequest`.
        :raises UnknownModel: there is no such model, or it is not sharded.
        :raises ImportRefused: the models are of several groups.
        """
        models: dict[type[Model], None] = {}
        for label in labels:
            model: Any = sharded_model(label).model._meta.concrete_model
            models[model] = None
            for relation in model._meta.local_many_to_many:
                if relation.remote_field.through._meta.auto_created:
                    models[relation.remote_field.through] = None
        groups = sorted({str(group_of(model)) for model in models})
        if len(groups) > 1:
            raise ImportRefused(
                [
                    f"the models are of the groups {groups!r}: import those of each group by themselves"
                ]
            )
        tables = [SourceTable(model, source) for model in in_order(list(models))]
        return cls(tables, groups[0], source, **options)

    @property
    def labels(self) -> list[str]:
        return [table.label for table in self.tables]


def in_order(models: Sequence[type[Model]]) -> list[type[Model]]:
    """Sort ``models`` so that foreign keys refer to earlier models only, and return the list.

    If models refer to one another in a circle, there is no such order, and they keep their order.
    """
    ordered: dict[type[Model], None] = {}
    under_way: set[type[Model]] = set()

    def add(model: type[Model]) -> None:
        if model in ordered or model in under_way:
            return
        under_way.add(model)
        for reference in model._meta.local_concrete_fields:
            if isinstance(reference, ForeignKey) and reference.related_model in models:
                add(reference.related_model)
        ordered[model] = None

    for model in models:
        add(model)
    return list(ordered)


@dataclass
class ImportReport:
    """The outcome of an import, or of a comparison of imported rows.

    :param run: the id of the run in the journal of operations.
    :param finished: whether the run is finished, by this process or by another one.
    :param tables: numbers of rows, such as ``{"photos.Photo": {"copied": 7}}``.
    :param rounds: how many times the run has gone through all tables.
    :param problems: sentences about what is left to do. Empty if all is well.
    :param notes: further sentences for the operator, about what was done.
    :param stopped: why this process stopped early; "" if it did not.
    :param left: number of ranges of primary keys that are not done.
    """

    run: int | None
    finished: bool
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    rounds: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""
    left: int = 0

    @property
    def ok(self) -> bool:
        return self.finished and not self.problems and not self.stopped

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "run": self.run,
            "finished": self.finished,
            "rounds": self.rounds,
            "tables": self.tables,
            "problems": self.problems,
            "notes": self.notes,
            "stopped": self.stopped,
            "left": self.left,
        }


def add_counts(total: dict[str, int], counts: Iterable[tuple[str, int]]) -> None:
    """Add each number in ``counts`` to the number with the same name in ``total``.

    :param counts: pairs (name, number), such as ``("copied", 7)``.
    """
    for name, number in counts:
        total[name] = total.get(name, 0) + number
