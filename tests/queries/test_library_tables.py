"""The library's own tables are found without naming their database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.db import IntegrityError, router, transaction
from django.db.migrations.loader import MigrationLoader

from sharded_orm import runtime
from sharded_orm.ids.tickets.exceptions import TicketServerRequired
from sharded_orm.models import KeyMove, OperationRun, Placement, TicketSequence
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


def test_a_placement_is_created_and_found_in_the_directory(db: None) -> None:
    placement = Placement.objects.create(group="photos", key=str(UNPLACED), shard=9)
    assert placement._state.db == "directory"
    assert Photo.objects.create(user_id=UNPLACED, title="x")._state.db == "photos_00009"
    assert Placement.objects.get(key=str(UNPLACED)) == placement
    assert Placement.objects.filter(group="photos").using("directory").count() == 1
    placement.delete()
    assert not Placement.objects.exists()


def test_many_placements_and_those_of_migrations_go_there_as_well(db: None) -> None:
    rows = [Placement(group="photos", key=str(key), shard=9) for key in (501, 502)]
    Placement.objects.bulk_create(rows)
    assert runtime.locate("photos", 501) == runtime.shard("photos", 9)
    state = MigrationLoader(None).project_state(("sharded_orm", "0001_initial"))
    historical = state.apps.get_model("sharded_orm", "Placement")
    assert historical.objects.filter(shard=9).count() == 2


def test_a_placement_of_another_database_stays_there() -> None:
    placement = Placement(group="photos", key="1", shard=9)
    placement._state.db = "default"
    assert router.db_for_write(Placement, instance=placement) == "default"


def test_moves_of_keys_are_recorded_beside_the_placements(db: None) -> None:
    move = KeyMove.objects.create(
        group="photos", key="7", value="7", source=1, target=2, in_flight=True
    )
    assert move._state.db == "directory"
    assert KeyMove.objects.using("directory").get(in_flight=True) == move
    with pytest.raises(IntegrityError), transaction.atomic("directory"):
        KeyMove.objects.create(
            group="photos", key="7", value="7", source=1, target=3, in_flight=True
        )
    KeyMove.objects.create(group="photos", key="7", value="7", source=3, target=1)
    KeyMove.objects.create(group="photos", key="7", value="7", source=3, target=1)


def test_the_journal_is_in_the_global_database() -> None:
    assert router.db_for_read(OperationRun) == "default"


def test_sequences_are_on_several_servers_so_one_has_to_be_named(db: None) -> None:
    with pytest.raises(TicketServerRequired, match=r"TicketSequence.objects.using\('tickets_1'\)"):
        TicketSequence.objects.count()
    assert TicketSequence.objects.using("tickets_1").filter(name="photos").exists()
    row = TicketSequence.objects.using("tickets_2").get(name="photos")
    row.refresh_from_db()
    assert row._state.db == "tickets_2"


def test_sequences_of_the_only_server_are_found(monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    config = replace(runtime.config(), tickets=("tickets_2",))
    monkeypatch.setattr(runtime, "config", lambda: config)
    assert TicketSequence.objects.get(name="photos")._state.db == "tickets_2"
