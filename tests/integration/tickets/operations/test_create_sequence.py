"""Sequences that migrations create."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db import NotSupportedError, connections, migrations
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.optimizer import MigrationOptimizer
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter

from sharded_orm.ids.tickets.exceptions import InvalidSequence, SequenceNotChecked
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.migrations.operations import CreateSequence
from sharded_orm.operations.tickets import create, creation, missing_sequences, verify
from tests.integration.tickets.conftest import PAIR
from tests.integration.tickets.operations.project import Project
from tests.integration.tickets.operations.spare import down, generator_of, redirected, spare_servers
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, ONE

MIGRATION = """
from django.db import migrations
from sharded_orm.migrations.operations import CreateSequence

class Migration(migrations.Migration):
    dependencies = [("jobs", "0001_initial")]
    operations = [CreateSequence("jobs", start=100), CreateSequence("more")]
"""
# ##### In a project #####


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.manage("makemigrations", "jobs", "-v", "0")
    made.write("jobs/migrations/0002_sequences.py", MIGRATION)
    return made


def test_each_server_is_migrated_by_its_alias(project: Project) -> None:
    assert "No changes detected" in project.manage("makemigrations", "--check")
    project.manage("migrate")
    assert "has no sequence 'jobs'" in project.manage("check", "--database", "tickets_1")
    for number in (1, 2):
        project.manage("migrate", "--database", f"tickets_{number}")
        assert "0 silenced" in project.manage("check", "--database", f"tickets_{number}")
    assert project.take(0, "jobs", 2) == [101, 103]
    # From either server, as the process starts at a random one.
    ids = project.manage("tickets", "next", "more", "--count", "2").split()
    assert ids in (["1", "3"], ["2", "4"])
    assert "was there" in project.manage("tickets", "create")
    # Backwards nothing is dropped, and forwards again nothing is created again.
    project.manage("migrate", "jobs", "0001", "--database", "tickets_1")
    project.manage("migrate", "--database", "tickets_1")
    assert project.take(0, "jobs", 1) == [105]


def test_what_django_says_of_it(project: Project) -> None:
    assert "Begin ticket sequence jobs" in project.manage("migrate", "--plan")
    sql = project.manage("sqlmigrate", "jobs", "0002", "--database", "tickets_1")
    assert "CANNOT BE WRITTEN AS SQL" in sql
    project.manage("squashmigrations", "jobs", "0002", "--noinput")
    (squashed,) = (project.folder / "jobs" / "migrations").glob("0001_squashed*.py")
    assert "sharded_orm.migrations.operations.CreateSequence" in squashed.read_text()
    assert "No changes detected" in project.manage("makemigrations", "--check")


def test_in_a_test_run(project: Project) -> None:
    """There are no real servers, so the test run cannot use them."""
    assert "OK" in project.manage("test")
    assert not any(path.stat().st_size for path in project.folder.glob("*.sqlite3"))


# ##### In this process, on every backend #####

every_backend = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.fixture
def generator(transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty pair that is not taken for databases of a test run."""
    with spare_servers(tmp_path, *PAIR), generator_of(PAIR) as made:
        monkeypatch.setattr(
            creation,
            "_original_names",
            {alias: str(connections.settings[alias]["NAME"]) for alias in PAIR},
        )
        yield made


def apply(operation: CreateSequence, alias: str, *, backwards: bool = False) -> None:
    state = ProjectState()
    with connections[alias].schema_editor() as editor:
        method = operation.database_backwards if backwards else operation.database_forwards
        method("photos_app", editor, state, state)


class TestOnServers:
    pytestmark = every_backend

    def test_one_server_after_the_other(self, generator: TicketGenerator) -> None:
        for alias in ("default", *PAIR, *PAIR):
            apply(CreateSequence("other", start=1000), alias)
        assert [generator.next("other") for _ in range(4)] == [1001, 1000, 1003, 1002]
        apply(CreateSequence("other"), PAIR[0], backwards=True)
        assert generator.next("other") == 1005

    def test_a_partner_that_is_in_use(self, generator: TicketGenerator) -> None:
        apply(CreateSequence("other"), PAIR[0])
        generator.take("other", 1000)
        apply(CreateSequence("other"), PAIR[1])
        assert min(generator.take("other", 1)[0], generator.take("other", 1)[0]) > 1999
        assert not any(one.problem for one in verify(["other"], servers=generator.servers))

    def test_a_partner_that_is_down(self, generator: TicketGenerator) -> None:
        with down(generator, 1):
            with pytest.raises(SequenceNotChecked, match="'tickets_2' does not answer"):
                apply(CreateSequence("photos"), PAIR[0])
        assert "photos" in missing_sequences(generator.servers[0])

    def test_ids_that_exist(self, generator: TicketGenerator) -> None:
        Photo.objects.create(photo_id=500, user_id=ONE, title="x")
        with pytest.raises(InvalidSequence, match="id 500 exists"):
            apply(CreateSequence("photos", start=1), PAIR[0])
        apply(CreateSequence("photos"), PAIR[0])
        found = create(["photos"], servers=generator.servers)
        assert [one.next_id for one in found] == [501, 502]

    def test_a_file_that_the_migration_locks(self, generator: TicketGenerator) -> None:
        connection: Any = connections[PAIR[0]]
        if connection.vendor != "sqlite":
            pytest.skip("about files")
        connection.transaction_mode = "IMMEDIATE"
        try:
            with pytest.raises(NotSupportedError, match="atomic = False on the Migration"):
                apply(CreateSequence("other"), PAIR[0])
        finally:
            connection.transaction_mode = None

    def test_in_a_test_database_others_are_not_asked(self, generator: TicketGenerator) -> None:
        creation._original_names.update(dict.fromkeys(PAIR, "the real one"))
        with redirected(PAIR[1], NAME="/dev/null/none"):
            apply(CreateSequence("other", start=7), PAIR[0])
        assert generator.servers[0].take("other", 1)[0] == 7


def test_it_is_an_operation_like_others() -> None:
    operation = CreateSequence("photos", start=7, form="replace")
    name, args, kwargs = operation.deconstruct()
    assert (name, args) == ("CreateSequence", [])
    assert CreateSequence(**kwargs).deconstruct() == operation.deconstruct()
    assert operation.describe() == "Begin ticket sequence photos"
    assert operation.formatted_description().startswith("+")
    assert CreateSequence("Off-line jobs").migration_name_fragment == "sequence_off_line_jobs"

    migration = type("Migration", (migrations.Migration,), {"operations": [operation]})("0002", "x")
    text = MigrationWriter(migration, include_header=False).as_string()
    written: dict[str, Any] = {}
    exec(text, written)
    (again,) = written["Migration"].operations
    assert again.deconstruct() == operation.deconstruct()
    assert MigrationOptimizer().optimize([operation, again], "x") == [operation, again]


def test_the_loader_takes_the_package_for_no_migration() -> None:
    loader = MigrationLoader(None)
    assert {name for app, name in loader.disk_migrations if app == "sharded_orm"} == {
        "0001_initial",
        "0002_journal",
        "0003_fleet",
        "0004_exact_text",
        "0005_step_worker",
        "0006_key_move",
    }
    state = loader.project_state()
    changes = MigrationAutodetector(state, ProjectState.from_apps(apps)).changes(graph=loader.graph)
    assert "sharded_orm" not in changes
