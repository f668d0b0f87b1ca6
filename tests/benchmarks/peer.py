"""django-sharding's ticket table, run in an environment of its own.

It needs an old Django (3.2: its model uses ``NullBooleanField``). So it is a program of its
own: it reads how many ids to draw and answers with the seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.services.mariadb import Address

_REQUIREMENTS = ["Django>=3.2,<4", "django-sharding==5.2.0", "mysqlclient>=2.1", "setuptools<80"]

_PROGRAM = """
import json, sys, time
import django
from django.conf import settings
database = json.loads(sys.argv[1])
settings.configure(
    SECRET_KEY="x", INSTALLED_APPS=["django_sharding"], DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={"default": {"ENGINE": "django.db.backends.mysql", "SHARD_GROUP": None, **database}},
)
django.setup()
from django.db import connection
from django.apps import apps
from django_sharding_library.id_generation_strategies import TableStrategy
from django_sharding_library.models import TableStrategyModel
class Ids(TableStrategyModel):
    class Meta:
        app_label = "django_sharding"
with connection.schema_editor() as editor:
    editor.create_model(Ids)
strategy = TableStrategy("django_sharding.Ids")
assert strategy.get_next_id() < strategy.get_next_id()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(int(line)):
        strategy.get_next_id()
    print(time.perf_counter() - began, flush=True)
"""


class NotAvailable(Exception):
    """A peer cannot be installed or does not run."""


def environment(folder: Path, requirements: list[str]) -> str:
    """Make a virtual environment in ``folder`` and return the path of its interpreter.

    :raises NotAvailable: something cannot be installed.
    """
    python = str(folder / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", *requirements],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotAvailable(done.stderr.strip().splitlines()[-1])
    return python


class Peer:
    """The running program; a context manager.

    :raises NotAvailable: it does not run.
    """

    def __init__(self, address: Address, schema: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")
        try:
            self._process = self._start(json.dumps({**address.django(), "NAME": schema}))
        except BaseException:
            self._folder.cleanup()
            raise

    def _start(self, database: str) -> subprocess.Popen[str]:
        python = environment(Path(self._folder.name) / "venv", _REQUIREMENTS)
        process = subprocess.Popen(
            [python, "-W", "ignore", "-c", _PROGRAM, database],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise NotAvailable(process.stderr.read().strip().splitlines()[-1])
        return process

    def draw(self, count: int) -> float:
        """Draw ``count`` ids and return the seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()
        self._folder.cleanup()
