"""Which operations may run on the passive side first, and what is said about the others."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from django.db import migrations, models
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ModelState, ProjectState

from sharded_orm.operations.migrate.plan import Piece
from sharded_orm.operations.pairs.schema_compatibility import (
    Compatibility,
    PlannedOperation,
    examine,
)

APP = "photos"
Add = migrations.AddField


def state() -> ProjectState:
    state = ProjectState()
    fields = [
        ("id", models.BigAutoField(primary_key=True)),
        ("title", models.CharField(max_length=50)),
        ("note", models.CharField(max_length=50, null=True)),
        ("slug", models.CharField(max_length=50, unique=True)),
    ]
    state.add_model(ModelState(APP, "Photo", fields, {"unique_together": {("title", "slug")}}))
    return state


def examined(*operations: Operation, stops_writes: bool = False) -> Compatibility:
    planned, current = [], state()
    for operation in operations:
        before = current.clone()
        operation.state_forwards(APP, current)
        piece = Piece(operation, before, current.clone())
        planned.append(PlannedOperation(APP, "photos.0002_change", piece))
    return examine(planned, stops_writes=stops_writes)


def altered(name: str, field: models.Field[Any, Any]) -> Operation:
    return migrations.AlterField("photo", name, field)


def added(field: models.Field[Any, Any]) -> Operation:
    return Add("photo", "stars", field)


class Unknown(migrations.AddField):
    """An operation of another package."""


ALLOWED = [
    added(models.IntegerField(null=True)),
    added(models.IntegerField(default=5)),
    added(models.IntegerField(db_default=5)),
    added(models.CharField(max_length=9, blank=True)),
    added(models.JSONField(default=dict)),
    added(models.IntegerField(null=True, unique=True)),
    added(models.IntegerField(null=True, unique=True, default=None)),
    added(models.ForeignKey("photos.photo", models.CASCADE, null=True)),
    added(models.ManyToManyField("photos.photo")),
    migrations.AddIndex("photo", models.Index(fields=["title"], name="by_title")),
    migrations.CreateModel("Album", [("id", models.BigAutoField(primary_key=True))]),
    migrations.AlterModelOptions("photo", {"ordering": ["title"]}),
    migrations.AlterUniqueTogether("photo", set()),
    altered("title", models.CharField(max_length=50, null=True)),
    altered("title", models.CharField("name", max_length=50, help_text="?", default="x")),
    altered("title", models.CharField(max_length=50, db_index=True)),
    altered("slug", models.CharField(max_length=50)),
]
REFUSED = [
    (added(models.IntegerField()), "silently get 0"),
    (added(models.DateTimeField(default=datetime.datetime.now)), "default is computed"),
    (added(models.DateTimeField(auto_now_add=True)), "default is computed"),
    (added(models.DateTimeField(db_default=models.functions.Now())), "default is computed"),
    (added(models.IntegerField(default=5, unique=True)), "the same value"),
    (added(models.IntegerField(null=True, default=5, unique=True)), "the same value"),
    (added(models.IntegerField(null=True, db_default=5, unique=True)), "the same value"),
    (
        added(
            models.GeneratedField(
                expression=models.F("id"), output_field=models.IntegerField(), db_persist=True
            )
        ),
        "generated column",
    ),
    (migrations.RemoveField("photo", "note"), "still sends rows"),
    (migrations.DeleteModel("Photo"), "still sends rows"),
    (migrations.RenameField("photo", "note", "text"), "releases with the old name"),
    (migrations.RenameModel("Photo", "Picture"), "releases with the old name"),
    (migrations.AlterModelTable("photo", "pictures"), "releases with the old name"),
    (altered("title", models.CharField(max_length=60)), "value of the old type"),
    (altered("title", models.TextField()), "value of the old type"),
    (altered("note", models.CharField(max_length=50)), "still accepts rows"),
    (altered("title", models.CharField(max_length=50, unique=True)), "still accepts rows"),
    (altered("title", models.CharField(max_length=50, db_column="t")), "releases with the old"),
    (migrations.AlterUniqueTogether("photo", {("title", "note")}), "still accepts rows"),
    (
        migrations.AddConstraint(
            "photo", models.CheckConstraint(condition=models.Q(id__gt=0), name="positive")
        ),
        "still accepts rows",
    ),
    (migrations.AlterOrderWithRespectTo("photo", "note"), "it is not known"),
    (migrations.RunPython(migrations.RunPython.noop), "on rows of different moments"),
    (migrations.RunSQL("SELECT 1"), "on rows of different moments"),
    (Unknown("photo", "stars", models.IntegerField(null=True)), "it is not known"),
]


@pytest.mark.parametrize("operation", ALLOWED, ids=lambda operation: operation.describe())
def test_an_operation_to_which_rows_of_the_old_schema_fit_is_allowed(operation: Operation) -> None:
    assert examined(operation).refusals == ()


@pytest.mark.parametrize(
    ("operation", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_any_other_operation_is_refused_with_the_reason_and_a_way(
    operation: Operation, reason: str
) -> None:
    (refusal,) = examined(operation).refusals
    assert refusal.startswith("photos.0002_change: ")
    assert reason in refusal
    assert "Instead, " in refusal


@pytest.mark.parametrize(
    ("operation", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_with_stopped_writes_only_what_each_side_computes_is_refused(
    operation: Operation, reason: str
) -> None:
    refusals = examined(operation, stops_writes=True).refusals
    is_computed = reason in (
        "default is computed", "the same value", "it is not known", "on rows of different moments",
    )  # fmt: skip
    assert [reason in refusal for refusal in refusals] == [True] * is_computed


def test_with_stopped_writes_null_does_not_become_a_computed_value() -> None:
    """Django fills rows with NULL when a column no longer takes it."""
    now = models.CharField(max_length=50, default=lambda: str(datetime.datetime.now()))
    (refusal,) = examined(altered("note", now), stops_writes=True).refusals
    assert "store another value in the same row" in refusal
    constant = models.CharField(max_length=50, default="x")
    assert examined(altered("note", constant), stops_writes=True).refusals == ()


def test_each_operation_of_a_plan_is_examined() -> None:
    compatibility = examined(
        added(models.IntegerField(null=True)),
        migrations.RemoveField("photo", "note"),
        migrations.RemoveField("photo", "title"),
    )
    assert len(compatibility.refusals) == 2


@pytest.mark.parametrize(
    ("field", "is_allowed"),
    [
        (models.IntegerField(default=7, help_text="?", db_index=True), True),
        (models.IntegerField(default=5, null=True), False),
        (models.IntegerField(default=5, db_comment="a number"), False),
    ],
)
def test_a_new_column_must_not_lose_its_default_by_a_later_operation(
    field: models.Field[Any, Any], is_allowed: bool
) -> None:
    refusals = examined(added(models.IntegerField(default=5)), altered("stars", field)).refusals
    assert ["would lose its default" in each for each in refusals] == [True] * (not is_allowed)


def test_a_table_that_the_plan_creates_may_change_in_any_way() -> None:
    """The side with the old schema has no rows of it."""
    compatibility = examined(
        migrations.CreateModel("Album", [("id", models.BigAutoField(primary_key=True))]),
        Add("album", "name", models.IntegerField()),
        migrations.RemoveField("album", "name"),
        migrations.AddConstraint("album", models.UniqueConstraint(fields=["id"], name="u")),
    )
    assert compatibility.refusals == ()


def test_columns_whose_default_django_would_drop_are_named() -> None:
    compatibility = examined(
        added(models.IntegerField(default=5)),
        Add("photo", "empty", models.CharField(max_length=9, blank=True)),
        Add("photo", "known", models.IntegerField(db_default=5)),
        Add("photo", "nothing", models.IntegerField(null=True)),
    )
    assert list(map(str, compatibility.kept_defaults)) == [
        "photos.photo.stars",
        "photos.photo.empty",
    ]
