"""``manage.py tickets``: its output, its refusals, and its exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper

from sharded_orm import runtime
from sharded_orm.checks.databases import check_sequences
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.operations.tickets import declared_sequences
from tests.integration.tickets.conftest import PAIR
from tests.integration.tickets.operations.project import Project, file
from tests.integration.tickets.operations.spare import down, lose, set_back, spare_servers
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, ONE
from tests.services.postgresql import Address

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

WIDTH = 100
Run = Callable[..., str]


@pytest.fixture
def generator(transactional_db: None, tmp_path: Path) -> Iterator[TicketGenerator]:
    """A pair of empty servers for the command."""
    with spare_servers(tmp_path, *PAIR):
        made = runtime.tickets()
        yield made
        made.close()


@pytest.fixture
def tickets(generator: TicketGenerator) -> Run:
    """Run the command and return its output, which must fit the terminal."""

    def run(*arguments: str, fails: str | None = None) -> str:
        out = io.StringIO()
        if fails is None:
            call_command("tickets", *arguments, stdout=out, no_color=True)
        else:
            with pytest.raises(CommandError, match=fails):
                call_command("tickets", *arguments, stdout=out, no_color=True)
        if "--json" not in arguments:
            assert max(map(len, out.getvalue().splitlines()), default=0) <= WIDTH
        return out.getvalue()

    return run


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.update_form
def test_from_nothing_to_ids(tickets: Run) -> None:
    made = tickets("create", "photos", "other")
    assert lines(made) == [
        ["sequence", "server", "form", "next", "id"],
        ["photos", "tickets_1", "update", "1", "made"],
        ["tickets_2", "update", "2", "made"],
        ["other", "tickets_1", "update", "1", "made"],
        ["tickets_2", "update", "2", "made"],
    ]
    assert tickets("create", "photos").count("was there") == 2
    drawn = [int(tickets("next", "photos")) for _ in range(3)]
    assert len(set(drawn)) == 3
    several = [int(line) for line in tickets("next", "photos", "--count", "1000").splitlines()]
    assert len({*drawn, *several}) == 1003


def test_create_makes_what_models_draw_from(tickets: Run) -> None:
    made = tickets("create")
    assert all(name in made for name in declared_sequences())
    tickets("status")


def test_create_starts_where_it_is_told(tickets: Run) -> None:
    assert "1,000,000  made" in tickets("create", "other", "--start", "1000000")
    Photo.objects.create(photo_id=500, user_id=ONE, title="x")
    tickets("create", "photos", "--start", "500", fails=r"id 500 exists.* 501 or more")
    tickets("create", "photos", "--no-check", fails="--start N")
    made = tickets("create", "photos", "--start", "5", "--no-check")
    assert [line[-2:] for line in lines(made)[1:]] == [["5", "made"], ["6", "made"]]


@pytest.mark.update_form
def test_an_old_form_may_be_chosen(tickets: Run) -> None:
    tickets("create", "other", "--form", "tables", fails="invalid choice: 'tables'")
    tickets("create", "other", "--form", "sequence", fails="cannot have a sequence of form")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["next", "nothing"], "'nothing'.*tickets create nothing"),
        (["next", "photos", "--count", "0"], "Cannot take 0 ids"),
        (["next", "photos", "--count", "-1"], "Cannot take -1 ids"),
        (["next", "photos", "--count", "1000001"], "take 1 to 1,000,000"),
        (["next", "photos", "--count", "many"], "invalid int value: 'many'"),
        (["next"], "required: NAME"),
        ([], "required: ACTION"),
        (["make"], "invalid choice: 'make'"),
        (["create", "x" * 101], "101 characters, and 100 are possible"),
        (["create", "other", "--start", "0"], "cannot start at 0"),
        (["verify", "nothing"], "There is no sequence 'nothing'"),
        (["advance", "nothing"], "There is no sequence 'nothing'"),
        (["advance", "photos", "--margin", "-5"], "margin of -5"),
        (["advance", "photos", "--to", "0"], "moved to 0"),
        (["advance", "--server", "tickets_3"], r"no ticket server 'tickets_3'.*'tickets_1'"),
    ],
)
def test_what_it_refuses(tickets: Run, arguments: list[str], said: str) -> None:
    tickets("create", "photos")
    assert tickets(*arguments, fails=said) == ""


@pytest.mark.update_form
def test_status_is_readable(tickets: Run) -> None:
    tickets("create")
    tickets("create", "offline_jobs")
    tickets("create", "a_name_that_is_much_longer_than_the_others")
    tickets("next", "photos", "--count", "1000000")
    text = tickets("status")
    assert "tickets_1       1     2  answers" in text
    assert "\na_name_that_is_much_longer_than_the_others\n" in text
    assert "1,999,999" in text or "2,000,000" in text
    assert "No installed model draws from a_name_that_is_much_longer_than_the_others" in text
    assert "WRONG" not in text


def test_status_for_machines(tickets: Run, generator: TicketGenerator) -> None:
    tickets("create")
    shown = json.loads(tickets("status", "--json"))
    assert shown["problems"] == []
    assert [server["alias"] for server in shown["servers"]] == list(PAIR)
    assert {"name", "form", "position", "mark", "used", "problem"} == set(
        shown["servers"][0]["sequences"][0]
    )
    assert set(shown["drift"]) == set(declared_sequences())
    with down(generator, 1):
        shown = json.loads(tickets("status", "--json", fails="'tickets_2' does not answer"))
    assert shown["servers"][0]["error"] is None
    assert shown["problems"][0].startswith("'tickets_2' does not answer")


def test_status_fails_when_something_is_wrong(tickets: Run, generator: TicketGenerator) -> None:
    assert "answers" in tickets("status", fails="'tickets_2' has no sequence 'photos'")
    tickets("create")
    with down(generator, 0):
        text = tickets("status", fails="'tickets_1' does not answer: ")
    assert "tickets_1       1     2  DOES NOT ANSWER" in text
    lose(generator.servers[0], "photos")
    tickets("status", fails="'tickets_1' has no sequence 'photos': run 'manage.py tickets create'")


@pytest.mark.update_form
def test_a_restored_server(tickets: Run, generator: TicketGenerator) -> None:
    tickets("create")
    for server in generator.servers * 2:
        server.take("photos", 5)
    generator.close()
    Photo.objects.create(photo_id=19, user_id=ONE, title="x")
    assert "WRONG" not in tickets("verify")
    set_back(generator.servers[0], "photos", 9)

    assert "WRONG" in tickets("status", fails="'photos' on 'tickets_1' is at 9, below 19")
    text = tickets("verify", fails="id 19 exists.*tickets advance photos'")
    assert [line[-1] for line in lines(text) if "photos" in line] == ["WRONG"]
    dry = tickets("advance", "photos", "--dry-run")
    assert "would be at" in dry and "10,019" in dry
    assert tickets("verify", "photos", fails="id 19 exists")
    moved = tickets("advance", "photos", "--server", "tickets_1")
    assert lines(moved)[1:] == [["photos", "tickets_1", "9", "10,019"]]
    tickets("verify")
    tickets("status")
    again = tickets("advance", "photos", "--to", "5")
    assert again.count("stays") == 2


def test_advance_of_a_server_that_is_down(tickets: Run, generator: TicketGenerator) -> None:
    tickets("create", "photos")
    with down(generator, 0):
        text = tickets("advance", "photos", fails="'tickets_1' does not answer")
    assert lines(text)[1:] == [
        ["photos", "tickets_1", "?", "?", "NOT", "MOVED"],
        ["tickets_2", "0", "0", "NOT", "MOVED"],
    ]


@pytest.mark.update_form
def test_verify_of_a_server_that_is_down(tickets: Run, generator: TicketGenerator) -> None:
    tickets("create", "photos", "photos_app_album")
    with down(generator, 1):
        text = tickets(
            "verify", "photos", "photos_app_album", fails=r"\A'tickets_2' does not answer: .*\Z"
        )
    assert text.count("NOT CHECKED") == 2
    assert text.count("ok") == 2


def test_progress_is_for_terminals(generator: TicketGenerator) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    call_command("tickets", "create", stdout=io.StringIO())
    for verbosity, shown in ((1, True), (0, False)):
        terminal = Terminal()
        out: Any = OutputWrapper(terminal)
        call_command("tickets", "verify", stdout=out, no_color=True, verbosity=verbosity)
        assert (f"\r1/{len(declared_sequences())} " in terminal.getvalue()) is shown


@pytest.mark.parametrize("action", ["create", "status", "next", "advance", "verify"])
def test_every_action_has_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call_command("tickets", action, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"tickets {action}" in shown
    assert "--settings" not in shown  # Django's own options are in the command's help


def test_django_s_own_options_may_stand_behind_the_action(tickets: Run) -> None:
    assert "made" in tickets("create", "other", "--no-color", "-v", "0", "--traceback")


def test_the_check_of_missing_sequences(tickets: Run, generator: TicketGenerator) -> None:
    tickets("create", "photos")
    assert check_sequences() == []
    assert check_sequences(databases=["default"]) == []
    (warning,) = check_sequences(databases=["default", "tickets_1"])
    assert warning.id == "sharded_orm.W025"
    assert "'tickets_1' has no sequence" in warning.msg
    assert "'photos'" not in warning.msg
    tickets("create")
    assert check_sequences(databases=list(PAIR)) == []


def test_two_kinds_of_servers(postgresql: Address, tmp_path: Path) -> None:
    """The whole life of a pair, one of them on PostgreSQL."""
    one = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", **postgresql.django()}
    project = Project(tmp_path, one, file("tickets_2"))
    project.manage("makemigrations", "jobs", "-v", "0")
    project.manage("migrate", "-v", "0")
    assert lines(project.manage("tickets", "create", "--start", "50"))[1:] == [
        ["jobs", "tickets_1", "sequence", "51", "made"],
        ["tickets_2", "update", "50", "made"],
    ]
    assert project.take(0, "jobs", 3) == [51, 53, 55]
    project.manage("shell", "-c", "from jobs.models import Job; Job(id=1001).save()")
    assert "id 1001 exists" in project.manage("tickets", "verify", fails=True)
    assert lines(project.manage("tickets", "advance"))[1:] == [
        ["jobs", "tickets_1", "55", "11,001"],
        ["tickets_2", "48", "10,048"],
    ]
    project.manage("tickets", "verify")
    assert project.take(0, "jobs", 1) == [11003]
    (tmp_path / "tickets_2.sqlite3").unlink()
    assert "has no sequence 'jobs'" in project.manage("tickets", "status", fails=True)
    assert "21,004  made" in project.manage("tickets", "create")
    shown = json.loads(project.manage("tickets", "status", "--json"))
    assert [server["sequences"][0]["form"] for server in shown["servers"]] == ["sequence", "update"]
