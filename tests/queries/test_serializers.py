"""Serializers of Django REST framework and model forms of models with generated ids."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import FieldError
from django.db import models
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.state import ModelState, ProjectState
from django.forms import modelform_factory
from django.test.utils import isolate_apps
from rest_framework.generics import CreateAPIView
from rest_framework.serializers import ModelSerializer
from rest_framework.test import APIRequestFactory

from sharded_orm.models import PackedIDField, TicketField, TimestampedIDField
from tests.photos.models import Note, Photo, Save, Story
from tests.queries.conftest import DATABASES, ONE

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

ROWS: list[tuple[Any, dict[str, Any]]] = [
    (Photo, {"user_id": ONE, "title": "x", "tags": []}),
    (Story, {"author": 7, "text": "x"}),
    (Note, {"text": "x"}),
]


def serializer_of(model: Any, **options: Any) -> Any:
    meta = type("Meta", (), {"model": model, "fields": "__all__", **options})
    return type(f"{model.__name__}Serializer", (ModelSerializer,), {"Meta": meta})


def post(model: Any, values: dict[str, Any], **options: Any) -> Any:
    view = CreateAPIView.as_view(serializer_class=serializer_of(model, **options))
    return view(APIRequestFactory().post("/", values, format="json"))


@pytest.mark.parametrize(("model", "values"), ROWS)
def test_a_post_without_ids_stores_a_row_with_generated_ones(
    model: Any, values: dict[str, Any], db: None
) -> None:
    response = post(model, values)
    assert response.status_code == 201, response.data
    pk = response.data[model._meta.pk.name]
    [row] = model.objects.scatter().filter(pk=pk)
    assert row.pk == pk > 0
    if model is Note:
        assert response.data["stamp"] == row.stamp > 0


@pytest.mark.parametrize(("model", "values"), ROWS)
def test_a_visitor_cannot_choose_a_generated_id(
    model: Any, values: dict[str, Any], db: None
) -> None:
    response = post(model, {**values, model._meta.pk.name: 5, "stamp": 6})
    assert response.status_code == 201, response.data
    assert response.data[model._meta.pk.name] != 5
    assert response.data.get("stamp") != 6


@pytest.mark.parametrize("model", [Photo, Story, Note, Save])
def test_a_form_has_no_field_for_a_generated_id(model: Any) -> None:
    form = modelform_factory(model, fields="__all__")
    assert not {"photo_id", "id", "stamp"} & set(form.base_fields)


def test_a_form_that_names_a_generated_id_says_that_it_has_none() -> None:
    with pytest.raises(FieldError, match="'photo_id' cannot be specified for Photo model form"):
        modelform_factory(Photo, fields=["photo_id", "title"])


@isolate_apps("tests.photos")
def test_an_id_that_is_declared_editable_is_an_input() -> None:
    class Job(models.Model):
        number = TicketField(editable=True)
        stamp = TimestampedIDField(unique=True, editable=True)
        other = TicketField()

        class Meta:
            app_label = "photos_app"

    fields = serializer_of(Job)().fields
    assert not fields["number"].read_only and not fields["stamp"].read_only
    assert fields["other"].read_only


@pytest.mark.parametrize(
    "field",
    [
        TicketField(primary_key=True),
        TimestampedIDField(primary_key=True),
        PackedIDField(primary_key=True, type_id=1),
    ],
)
def test_migrations_do_not_name_the_default(field: Any) -> None:
    path, args, kwargs = field.deconstruct()[1:]
    assert path.endswith(type(field).__name__)
    assert "editable" not in kwargs
    assert type(field)(*args, **kwargs).editable == field.editable


@pytest.mark.parametrize("kind", [TicketField, TimestampedIDField])
def test_migrations_keep_an_explicit_choice(kind: Any) -> None:
    assert kind(editable=True).deconstruct()[3]["editable"] is True
    assert kind(editable=True).clone().editable is True
    assert "editable" not in kind(editable=False).deconstruct()[3]


def test_a_migration_that_names_the_old_attribute_makes_no_new_one() -> None:
    """A project may have written ``editable=False`` itself; its migrations hold it."""

    def state(**attributes: Any) -> ProjectState:
        project = ProjectState()
        fields = [("id", TicketField(primary_key=True, **attributes))]
        project.add_model(ModelState("photos_app", "Job", fields))
        return project

    changes = MigrationAutodetector(state(editable=False), state())._detect_changes()
    assert changes == {}
