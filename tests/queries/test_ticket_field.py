"""TicketField in everything that creates rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import serializers
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.forms import modelform_factory

from sharded_orm import runtime
from sharded_orm.models import TicketField
from tests.photos.models import Album, Person, Photo
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
]

USER = 7001


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The requests to the ticket servers."""
    requests: list[tuple[str, int]] = []
    generator = runtime.tickets()
    take = generator.take

    def noted(sequence: str, count: int) -> Any:
        requests.append((sequence, count))
        return take(sequence, count)

    monkeypatch.setattr(generator, "take", noted)
    return requests


def test_save_and_create_draw_one(drawn: list[tuple[str, int]]) -> None:
    one, two = Photo(user_id=USER, title="x"), Photo.objects.create(user_id=USER, title="y")
    assert one.pk is None
    one.save()
    assert 0 < two.pk != one.pk
    one.save()
    assert drawn == [("photos", 1), ("photos", 1)]


def test_the_sequence_is_the_table_s_name_by_default(drawn: list[tuple[str, int]]) -> None:
    Album.objects.create(owner=Person.objects.create(username="ada"), title="x")
    assert drawn == [(Album._meta.db_table, 1)]


def test_bulk_create_draws_once(drawn: list[tuple[str, int]]) -> None:
    rows = Photo.objects.bulk_create([Photo(user_id=USER + n % 5, title="x") for n in range(50)])
    assert drawn == [("photos", 50)]
    assert len({row.pk for row in rows}) == 50


def test_get_or_create_draws_only_for_a_new_row(drawn: list[tuple[str, int]]) -> None:
    row, made = Photo.objects.get_or_create(user_id=USER, title="x")
    again, made_again = Photo.objects.get_or_create(user_id=USER, title="x")
    assert (made, made_again, again.pk) == (True, False, row.pk)
    row, _ = Photo.objects.update_or_create(user_id=USER, title="x", defaults={"stars": 3})
    assert row.pk == again.pk
    assert len(drawn) == 1


def test_an_explicit_id_is_kept(drawn: list[tuple[str, int]]) -> None:
    assert Photo.objects.create(photo_id=-5, user_id=USER, title="x").pk == -5
    assert Photo.objects.get(user_id=USER, pk=-5).title == "x"
    assert drawn == []


def test_a_form_does_not_ask_for_the_id() -> None:
    form = modelform_factory(Photo, fields="__all__")({"user_id": USER, "title": "x"})
    assert "photo_id" not in form.fields
    assert form.is_valid(), form.errors
    assert form.save().pk > 0


def test_validation_lets_the_id_be_empty_and_checks_one_that_is_there() -> None:
    Photo(user_id=USER, title="x").full_clean()
    with pytest.raises(ValidationError, match="photo_id"):
        Photo(photo_id=2**63, user_id=USER, title="x").full_clean()


def test_a_fixture_keeps_its_ids(tmp_path: Path, drawn: list[tuple[str, int]]) -> None:
    Photo.objects.create(user_id=USER, title="placed")
    drawn.clear()
    shard = runtime.locate("photos", USER)
    assert shard is not None
    fixture = tmp_path / "photos.json"
    fields = {"user_id": USER, "title": "from a fixture"}
    fixture.write_text(json.dumps([{"model": Photo._meta.label, "pk": -77, "fields": fields}]))
    call_command("loaddata", str(fixture), database=shard.alias, verbosity=0)
    assert Photo.objects.get(user_id=USER, pk=-77).title == "from a fixture"
    assert drawn == []
    assert '"pk": -77' in serializers.serialize("json", Photo.objects.filter(user_id=USER))


def test_the_asynchronous_methods_draw_as_well(drawn: list[tuple[str, int]]) -> None:
    async def make() -> list[int]:
        one = Photo(user_id=USER, title="x")
        await one.asave()
        two = await Photo.objects.acreate(user_id=USER, title="y")
        three, _ = await Photo.objects.aget_or_create(user_id=USER, title="z")
        more = await Photo.objects.abulk_create([Photo(user_id=USER, title="w") for _ in range(3)])
        return [one.pk, two.pk, three.pk, *(row.pk for row in more)]

    made = async_to_sync(make)()
    assert len(set(made)) == 6
    assert [count for _, count in drawn] == [1, 1, 1, 3]


def test_migrations_name_the_field_where_it_stays() -> None:
    field = TicketField(primary_key=True, sequence="photos")
    _, path, args, kwargs = field.deconstruct()
    assert path == "sharded_orm.models.fields.TicketField"
    assert (args, kwargs) == ([], {"primary_key": True, "sequence": "photos"})
