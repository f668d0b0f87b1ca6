"""Commands end with a message if the settings are wrong; other processes still raise the error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.topology.site import ROOT, document
from tests.patience import PATIENCE
from tests.python_process import run_python

RANGES = [{"range": [0, 3], "primary": "one"}]
SETTING = {
    "NODES": {"one": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "/nowhere"}},
    "GROUPS": {"photos": {"STRATEGY": "modulo", "RANGES": RANGES}},
}
#: For each mistake: the changes of the setting, and what is said of them.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"NODE": {}}, "unknown key 'NODE'"),
    "name": (
        {"GROUPS": {"default": {"STRATEGY": "modulo", "RANGES": RANGES}}},
        "group 'default' has the name of an entry of DATABASES",
    ),
    "engine": (
        {"NODES": {"one": {"ENGINE": "sharded_orm.backends.oracle"}}},
        "ENGINE 'sharded_orm.backends.oracle' of 'one' cannot be used: No module named",
    ),
}


PROGRAMS = {
    "manage.py": "from django.core.management import execute_from_command_line as run; run(sys.argv)",
    "script.py": "import django; django.setup()",
}


def run(folder: Path, changes: dict[str, Any], program: str, *arguments: str) -> tuple[int, str]:
    """Run one of ``PROGRAMS``; return its exit status and what it writes to standard error."""
    default = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    (folder / "wrong_settings.py").write_text(
        "from sharded_orm.topology.aliases import sharded_databases\n"
        f"DATABASES = sharded_databases({{'default': {default!r}}})\n"
        "INSTALLED_APPS = ['django.contrib.contenttypes', 'sharded_orm']\n"
        f"SHARDED_ORM = { ({**SETTING, **changes})!r}\n"
    )
    (folder / program).write_text(f"import sys; {PROGRAMS[program]}\n")
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "wrong_settings",
        "PYTHONPATH": str(ROOT),
    }
    command = [str(folder / program), *arguments]
    done = run_python(command, cwd=folder, env=environment, timeout=PATIENCE)
    return done.returncode, done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_command_ends_with_a_message(tmp_path: Path, mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    code, errors = run(tmp_path, changes, "manage.py", "migrate_shards")
    assert code == 1
    assert errors.startswith("CommandError: ")
    assert message in errors
    assert "Traceback" not in errors


WITHOUT_TOPOLOGY = {
    "TOPOLOGY": {"SOURCE": "file", "OPTIONS": {"PATH": "topology.json"}},
    "GROUPS": {"photos": {"STRATEGY": "modulo"}},
}


def test_only_the_command_topology_starts_without_a_topology(tmp_path: Path) -> None:
    """It publishes the first one."""
    for command in [
        ("manage.py", "check"),
        ("script.py",),
        # A web server may have an argument that is also the name of the command.
        ("script.py", "topology"),
    ]:
        code, errors = run(tmp_path, WITHOUT_TOPOLOGY, *command)
        assert (code, "nothing was pushed there yet" in errors) == (1, True), (command, errors)
    first = tmp_path / "first.json"
    first.write_text(json.dumps(document(0)))
    code, errors = run(tmp_path, WITHOUT_TOPOLOGY, "manage.py", "topology", "push", str(first))
    # The command compares what it would write. It does not write to a file.
    assert (code, "Make this change there" in errors) == (1, True), errors
    first.rename(tmp_path / "topology.json")
    assert run(tmp_path, WITHOUT_TOPOLOGY, "script.py", "topology") == (0, "")


@pytest.mark.parametrize(
    "command",
    [
        ("script.py",),
        # Many programs have arguments that are also names of commands.
        ("script.py", "check"),
        ("manage.py", "check", "--traceback"),
    ],
)
def test_other_programs_raise_the_error(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Such as a web server, whose log then has the traceback."""
    code, errors = run(tmp_path, {"NODE": {}}, *command)
    assert code == 1
    assert errors.startswith("Traceback")
    assert "unknown key 'NODE'" in errors
