"""Each command of Django with no alias, a shard's and the group's: it has its effect, or fails.

The table of ``docs/reference/django-commands.md`` is compared with the cases.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import django
import pytest
from django.core.management import find_commands

from tests.integration.shards.conftest import Fleet, Run, sqlite_template  # noqa: F401  # a fixture
from tests.patience import PATIENCE
from tests.services.server import HOST, free_port

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/django-commands.md"
SETTINGS = "tests.integration.django_commands.settings"
NONE, SHARD, GROUP = "none", "photos_00001", "photos"
ALIASES = (NONE, SHARD, GROUP)
# Commands that work on files only.
WITHOUT_DATABASE = {
    "collectstatic",
    "compilemessages",
    "findstatic",
    "makemessages",
    "ogrinspect",
    "startapp",
    "startproject",
}
# Servers have a test of their own.
SERVERS = {"runserver", "testserver"}


TRIPS = {
    "__init__.py": "",
    "models.py": """
from django.db import models
from sharded_orm.models import ShardedModel

class Trip(ShardedModel):
    user_id = models.BigIntegerField()
    to = models.CharField(max_length=9)

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
""",
    "migrations/__init__.py": "",
    "migrations/0001_initial.py": """
from django.db import migrations, models

class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel("Trip", [
            ("id", models.BigAutoField(primary_key=True, auto_created=True, serialize=False, verbose_name="ID")),
            ("user_id", models.BigIntegerField()),
        ], options={"abstract": False}),
    ]
""",
    "migrations/0002_to.py": """
from django.db import migrations, models

class Migration(migrations.Migration):
    dependencies = [("trips", "0001_initial")]
    operations = [
        migrations.AddField("Trip", "to", models.CharField(max_length=9, default=""), preserve_default=False),
    ]
""",
}


class Project(Fleet):
    """A fleet in which the user 1 has a row on shard 1, and "ada" is a person in the global database."""

    @property
    def variables(self) -> dict[str, str]:
        return {"DJANGO_SETTINGS_MODULE": SETTINGS, "PYTHONPATH": f"{self.folder}:{ROOT}"}

    def manage(self, *arguments: str, given: str = "") -> Run:
        return self.python("-m", "django", *arguments, given=given, **self.variables)

    def manage_all(self, *commands: str) -> None:
        for command in commands:
            run = self.manage(*command.split())
            assert run.code == 0, run.err

    def rows(self) -> dict[str, list[str]]:
        """Return what is stored, by database."""
        query = "SELECT title FROM photos_app_photo ORDER BY photo_id"
        people = "SELECT username FROM photos_app_person ORDER BY id"
        stored = {f"photos_{n:05d}": self.sql("photos", n, query) for n in (1, 2)}
        stored["default"] = self.in_default(people)
        return {alias: [value for (value,) in rows] for alias, rows in stored.items() if rows}

    def in_default(self, *statements: str) -> list[tuple[str, ...]]:
        with sqlite3.connect(self.folder / "default.sqlite3") as connection:
            for statement in statements:
                rows = connection.execute(statement).fetchall()
        connection.close()
        return rows


@pytest.fixture(scope="module")
def migrated(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("commands") / "project"
    shutil.copytree(sqlite_template, folder)
    project = Project(folder)
    for name, text in TRIPS.items():
        (folder / "trips" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "trips" / name).write_text(text)
    project.manage_all(
        "migrate -v0", "migrate_shards -v0 --group photos", "tickets create", "createcachetable"
    )
    for user, shard in ((1, 1), (2, 2)):
        project.place(user, shard)
        project.sql(
            "photos", shard,
            "INSERT INTO photos_app_photo (photo_id, user_id, title)"
            f" VALUES ({user}, {user}, 'of {user}')",
        )  # fmt: skip
    project.in_default(
        "INSERT INTO photos_app_person (id, username) VALUES (1, 'ada')",
        "INSERT INTO auth_user (id, username, password, is_superuser, first_name, last_name, email,"
        " is_staff, is_active, date_joined) VALUES (1, 'ada', '', 0, '', '', '', 0, 1, '2026-01-01')",
        "INSERT INTO django_content_type (app_label, model) VALUES ('photos_app', 'gone')",
        "INSERT INTO django_session VALUES ('old', '', '2020-01-01')",
    )
    rows = [
        {"model": "photos_app.person", "pk": 2, "fields": {"username": "bob"}},
        {"model": "photos_app.photo", "pk": 11, "fields": {"user_id": 1, "title": "new of 1"}},
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def project(migrated: Path, tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    shutil.copytree(migrated, folder)
    return Project(folder)


START = {"photos_00001": ["of 1"], "photos_00002": ["of 2"], "default": ["ada"]}


@dataclass(frozen=True)
class Works:
    """The command ends with status 0, and prints something that matches, or stores something."""

    pattern: str = ""
    stored: Callable[[Project], object] = Project.rows
    expected: object = None


@dataclass(frozen=True)
class Fails:
    """The command ends with status 1 and no traceback, and its error says what to do instead."""

    pattern: str


@dataclass(frozen=True)
class Case:
    """A command, and what it does with each alias. Without ``--database`` there is only NONE."""

    arguments: str
    outcomes: dict[str, Works | Fails]
    given: dict[str, str] = field(default_factory=dict)


def query(statement: str) -> Callable[[Project], object]:
    return lambda project: project.in_default(statement)


def one(works: Works | Fails) -> dict[str, Works | Fails]:
    return {NONE: works}


USERS = "SELECT username, is_superuser FROM auth_user ORDER BY id"
ONE_SHARD = r"name one shard, such as '--database photos_00000'"

CASES: dict[str, Case] = {
    "changepassword": Case(
        "changepassword nobody",
        {
            NONE: Fails("user 'nobody' does not exist"),
            SHARD: Fails("leave --database out"),
            GROUP: Fails("leave --database out"),
        },
    ),
    "check": Case("check", dict.fromkeys(ALIASES, Works("System check identified"))),
    "clearsessions": Case(
        "clearsessions", one(Works(stored=query("SELECT * FROM django_session"), expected=[]))
    ),
    "createcachetable": Case(
        "createcachetable",
        {
            NONE: Works("Cache table 'cache_rows' already exists"),
            SHARD: Fails("leave --database out"),
            GROUP: Fails("leave --database out"),
        },
    ),
    "createsuperuser": Case(
        "createsuperuser --noinput --username root --email root@example.com",
        {
            NONE: Works(stored=query(USERS), expected=[("ada", 0), ("root", 1)]),
            SHARD: Fails("leave --database out"),
            GROUP: Fails("leave --database out"),
        },
    ),
    "dbshell": Case(
        "dbshell",
        {
            NONE: Works("^ada$"),
            SHARD: Works("^of 1$"),
            GROUP: Fails("'manage.py shards sql photos_00000'"),
        },
        given={
            NONE: "SELECT username FROM photos_app_person;",
            SHARD: "SELECT title FROM photos_app_photo;",
            GROUP: "SELECT 1",
        },
    ),
    "diffsettings": Case("diffsettings", one(Works("^SHARDED_ORM = "))),
    "dumpdata": Case(
        "dumpdata photos_app",
        {
            NONE: Works(r"ada.*of 1.*of 2"),
            SHARD: Works(r"^\[(?!.*(ada|of 2)).*of 1"),
            GROUP: Works(r"^\[(?!.*ada).*of 1.*of 2"),
        },
    ),
    "flush": Case(
        "flush --noinput",
        {
            NONE: Works(expected={"photos_00001": ["of 1"], "photos_00002": ["of 2"]}),
            SHARD: Works(expected={"default": ["ada"], "photos_00002": ["of 2"]}),
            GROUP: Fails(r"'manage.py shards run \"flush --no-input\" --group photos'"),
        },
    ),
    "inspectdb": Case(
        "inspectdb",
        {
            NONE: Works("class AuthUser"),
            SHARD: Works("class PhotosAppPhoto"),
            GROUP: Fails(ONE_SHARD),
        },
    ),
    "loaddata": Case(
        "loaddata {folder}/rows.json",
        {
            NONE: Works(
                "Installed 2 object",
                expected={**START, "photos_00001": ["of 1", "new of 1"], "default": ["ada", "bob"]},
            ),
            SHARD: Works(
                r"Installed 1 object\(s\) \(of 2\)",
                expected={**START, "photos_00001": ["of 1", "new of 1"]},
            ),
            GROUP: Works(
                r"Installed 1 object\(s\) \(of 2\)",
                expected={**START, "photos_00001": ["of 1", "new of 1"]},
            ),
        },
    ),
    "makemigrations": Case("makemigrations --check", one(Works("No changes detected"))),
    "migrate": Case(
        "migrate",
        {
            NONE: Works("No migrations to apply"),
            SHARD: Works("No migrations to apply"),
            GROUP: Fails("'manage.py migrate_shards --group photos' migrates them"),
        },
    ),
    "optimizemigration": Case(
        "optimizemigration trips 0002", one(Works("No optimizations possible"))
    ),
    "remove_stale_contenttypes": Case(
        "remove_stale_contenttypes --noinput",
        {
            NONE: Works(
                stored=query("SELECT model FROM django_content_type WHERE model = 'gone'"),
                expected=[],
            ),
            SHARD: Fails("leave --database out"),
            GROUP: Fails("leave --database out"),
        },
    ),
    "sendtestemail": Case("sendtestemail a@example.com", one(Works("To: a@example.com"))),
    "shell": Case("shell -c 'print(Photo.objects.get(user_id=1).title)'", one(Works("^of 1$"))),
    "showmigrations": Case(
        "showmigrations photos_app",
        {
            NONE: Works(r"\[X\] 0001_initial"),
            SHARD: Works(r"\[X\] 0001_initial"),
            GROUP: Fails("'manage.py migrate_shards --group photos --status'"),
        },
    ),
    "sqlflush": Case(
        "sqlflush",
        {
            NONE: Works('DELETE FROM "auth_user"'),
            SHARD: Works('DELETE FROM "photos_app_photo"'),
            GROUP: Fails(ONE_SHARD),
        },
    ),
    "sqlmigrate": Case(
        "sqlmigrate photos_app 0001",
        {
            NONE: Works('CREATE TABLE "photos_app_person"'),
            SHARD: Works('CREATE TABLE "photos_app_photo"'),
            GROUP: Fails(ONE_SHARD),
        },
    ),
    "sqlsequencereset": Case(
        "sqlsequencereset photos_app",
        {
            NONE: Works("No sequences found"),
            SHARD: Works("No sequences found"),
            GROUP: Fails(ONE_SHARD),
        },
    ),
    "squashmigrations": Case(
        "squashmigrations --noinput trips 0002", one(Works("Created new squashed migration"))
    ),
    "test": Case("test tests.integration.django_commands.cases", one(Works("Ran 1 test.*OK"))),
}


def cases() -> list[tuple[str, str]]:
    return [(name, alias) for name, case in sorted(CASES.items()) for alias in case.outcomes]


@pytest.mark.parametrize(("name", "alias"), cases())
def test_a_command_has_its_effect_or_fails(project: Project, name: str, alias: str) -> None:
    case = CASES[name]
    arguments = case.arguments.replace("{folder}", str(project.folder))
    named = [] if alias == NONE else [f"--database={alias}"]
    run = project.manage(*shlex.split(arguments), *named, given=case.given.get(alias, ""))
    outcome = case.outcomes[alias]
    output = f"{run.out}\n{run.err}"
    if isinstance(outcome, Fails):
        assert run.code == 1, output
        assert "Traceback" not in run.err, run.err
        assert re.search(outcome.pattern, run.err), run.err
        assert project.rows() == START
    else:
        assert run.code == 0, output
        assert re.search(outcome.pattern, output, re.MULTILINE | re.DOTALL), output
        assert outcome.stored(project) == (START if outcome.expected is None else outcome.expected)


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_a_server_serves_the_rows_of_shards(project: Project, name: str) -> None:
    """``testserver`` serves those of its fixture, and leaves the real ones alone."""
    port = free_port()
    own = ["runserver", "--noreload", f"{HOST}:{port}"]
    if name == "testserver":
        own = [
            "testserver",
            "--noinput",
            f"--addrport={HOST}:{port}",
            f"{project.folder}/rows.json",
        ]
    environment = {**os.environ, **project.variables, "FLEET_FOLDER": str(project.folder)}
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "django", *own],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "development server at" in line:  # Django 6.1 says which kind.
                    break
            else:
                pytest.fail("".join(lines))
            with urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=PATIENCE) as response:
                titles = response.read().decode()
        finally:
            process.kill()
    assert titles == ("of 1,of 2" if name == "runserver" else "new of 1")
    assert project.rows() == START


def test_every_command_of_django_has_a_case() -> None:
    folders = Path(django.__file__).parent.glob("**/management/commands")
    commands = {name for folder in folders for name in find_commands(str(folder.parent))}
    assert set(CASES) | SERVERS | WITHOUT_DATABASE == commands


def test_the_page_says_for_each_command_what_its_case_says() -> None:
    lines = re.findall(r"^\| `(\w+)`((?: \|.*)+)\|$", PAGE.read_text(), re.MULTILINE)
    cells = {name: [cell.strip() for cell in rest.split("|")[1:]] for name, rest in lines}
    assert set(cells) == set(CASES) | SERVERS | WITHOUT_DATABASE
    for name, case in CASES.items():
        assert len(cells[name]) == len(ALIASES)
        says = [cell.startswith("**error**") for cell in cells[name]]
        fails = [isinstance(case.outcomes.get(alias), Fails) for alias in ALIASES]
        if name == "changepassword":
            fails[0] = False  # The case is about a user who does not exist.
        assert says == fails, name
        assert ["—" in cell for cell in cells[name]] == [a not in case.outcomes for a in ALIASES]
