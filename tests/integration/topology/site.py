"""A site with a topology source, its processes and the commands of its operator."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any, TypeVar

from tests.integration.topology.project import prepare
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess

ROOT = Path(__file__).parents[3]
SHARDS = 4
T = TypeVar("T")


def wait_for(look: Callable[[], T | bool | None], what: str, patience: float = PATIENCE) -> T:
    """Poll ``look`` until it returns something true, and return that. There is no event."""
    end = time.monotonic() + patience
    while not (result := look()):
        assert time.monotonic() < end, f"{what} did not happen within {patience:g} s"
        time.sleep(0.01)
    return result  # type: ignore[return-value]  # not false


def document(
    version: int, primary: str = "one", *, shards: int = SHARDS, **groups: Any
) -> dict[str, Any]:
    """Return a document with all shards of ``photos`` on ``primary``."""
    photos = {"RANGES": [{"range": [0, shards - 1], "primary": primary}]}
    return {"format": 1, "version": version, "nodes": {}, "groups": {"photos": photos, **groups}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def unusable_documents(version: int) -> dict[str, str]:
    """Return documents as text that cannot be used, each under a part of its error message."""

    def text(**changes: Any) -> str:
        return json.dumps({**document(version), **changes})

    def strategy(name: str) -> dict[str, Any]:
        path = f"tests.integration.topology.strategies.{name}"
        return {"STRATEGY": path, "RANGES": [{"range": [0, 0], "primary": "one"}]}

    photos = document(version)["groups"]["photos"]
    return {
        "a group has at most 65,536 shards": text(
            groups={"photos": {"RANGES": [{"range": [0, 30_000_000], "primary": "one"}]}}
        ),
        "weight must be a number from 0 to 1,000,000": text(
            groups={"photos": {"RANGES": [{"range": [0, 3], "primary": "one", "weight": 1e308}]}}
        ),
        "it is not JSON": "[" * 100_000,
        "it is nested more than 32 deep": text(nodes={"one": {"OPTIONS": nested(500)}}),
        "it holds text that UTF-8 cannot encode": text(nodes={"one": {"OPTIONS": {"a": "\ud800"}}}),
        "DATABASE_NAME": text(groups={"photos": {**photos, "DATABASE_NAME": "{shard:030000000d}"}}),
        "it cannot be used: RuntimeError: a mistake": text(
            groups={"photos": photos, "visits": strategy("Broken")}
        ),
        "it cannot be used: RecursionError": text(
            groups={"photos": photos, "visits": strategy("Endless")}
        ),
    }


#: Code for a process: using a new document fails in the middle.
BREAK = """
from django.conf import settings
def fail(): raise ZeroDivisionError("a mistake of ours")
settings.DATABASES.renew_groups = fail
"""
MEND = "del settings.DATABASES.renew_groups"


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Site:
    """A group ``photos`` of four shards by modulo, and the nodes ``one`` and ``two``."""

    folder: Path
    nodes: dict[str, dict[str, Any]]
    source: dict[str, Any]
    sharded_orm: dict[str, Any] = field(default_factory=dict)
    strategy: str = "modulo"
    group: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.save()

    @property
    def file(self) -> Path:
        return self.folder / "site.json"

    @property
    def last_good(self) -> Path:
        return self.folder / "last_good" / "topology.json"

    def save(self) -> None:
        """Write the settings for processes that start from now on."""
        setting = {
            "NODES": self.nodes,
            "GROUPS": {"photos": {"STRATEGY": self.strategy, **self.group}},
            "TOPOLOGY": self.source,
            **self.sharded_orm,
        }
        default = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(self.folder / "default.sqlite3"),
        }
        self.file.write_text(
            json.dumps({"databases": {"default": default}, "sharded_orm": setting})
        )

    def start(self, *arguments: str, stderr: Any = PIPE) -> PythonProcess:
        project = "tests.integration.topology.project"
        return PythonProcess(
            ["-W", "error", "-m", project, str(self.file), *arguments],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTEST"))},
            stdin=PIPE,
            stderr=stderr,
            prepared=prepared_by(prepare),
        )

    def topology(self, *arguments: str, code: int = 0) -> Done:
        """Run ``manage.py topology …``, which must exit with the status ``code``."""
        process = self.start("topology", *arguments)
        out, err = process.communicate(timeout=PATIENCE * 2)
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return Done(process.returncode, out, err)

    def write(self, content: dict[str, Any], name: str = "new.json") -> str:
        path = self.folder / name
        path.write_text(json.dumps(content))
        return str(path)

    def push(self, content: dict[str, Any], *arguments: str, code: int = 0) -> Done:
        return self.topology("push", self.write(content), *arguments, code=code)

    def reported_version(self, pid: int) -> int | None:
        """Return the version that a process has reported; None while it is not connected."""
        processes = self.topology("show", "--json").json["processes"]
        return next((process["version"] for process in processes if process["pid"] == pid), None)

    @contextlib.contextmanager
    def processes(self, count: int = 1) -> Iterator[list[SiteProcess]]:
        """Start processes of the site and yield them when ready; they end with the block."""
        with contextlib.ExitStack() as stack:
            started = []
            for number in range(count):
                started.append(SiteProcess(self, f"{number}"))
                stack.callback(started[-1].close)
            for process in started:
                process.ask("1")
            yield started

    @contextlib.contextmanager
    def process(self) -> Iterator[SiteProcess]:
        with self.processes() as (process,):
            yield process


class SiteProcess:
    """A process of the site. It runs code that a test sends, and logs."""

    def __init__(self, site: Site, name: str) -> None:
        self.log_file = site.folder / f"process-{name}-{time.monotonic_ns()}.log"
        self._log = open(self.log_file, "w")  # noqa: SIM115  # open as long as the process
        self.popen = site.start("serve", stderr=self._log)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def run(self, code: str) -> Any:
        """Run ``code`` and return the value that it puts into ``answer``."""
        self.send(code)
        return self.receive()

    def send(self, code: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(code) + "\n")
        self.popen.stdin.flush()

    def receive(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the process ended:\n{self.log}"
        answer = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self.log}"
        return answer["answer"]

    def ask(self, expression: str) -> Any:
        return self.run(f"answer = {expression}")

    def wait_version(self, version: int) -> None:
        wait_for(lambda: self.ask("version()") == version, f"version {version} in use")

    def wait_log(self, text: str) -> None:
        wait_for(lambda: text in self.log, f"{text!r} in the log")

    def end(self) -> None:
        """Let the process end by itself."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(PATIENCE)

    def close(self) -> None:
        self.popen.kill()
        with self.popen:
            self._log.close()
