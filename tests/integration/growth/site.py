"""A site on SQLite whose groups grow, and the commands of its operator."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

from tests.integration.promotion.project import prepare
from tests.integration.promotion.site import PREAMBLE, ROOT, SOURCE, Done, create_once
from tests.integration.promotion.source import replace_file
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess
from tests.services.zookeeper import ZooKeeperServer

_content_by_name: dict[str, bytes] = {}


class Site:
    """Group ``photos`` has two shards on node ``one``; node ``two`` is empty."""

    def __init__(
        self,
        folder: Path,
        strategy: str = "directory",
        nodes: dict[str, dict[str, Any]] | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self.folder = folder
        self.document_file = folder / "topology.json"
        for node in ("one", "two"):
            (folder / node).mkdir()
        ranges = [{"range": [0, 1], "primary": "one"}]
        group = {
            "STRATEGY": strategy,
            "STRATEGY_OPTIONS": options,
            "DATABASE_NAME": prefix + "photos_{shard:05d}",
        }
        self.setting: dict[str, Any] = {
            "NODES": nodes
            or {
                node: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(folder / node)}
                for node in ("one", "two")
            },
            "GROUPS": {"photos": group},
            "DIRECTORY": "directory",
            "TOPOLOGY": {"SOURCE": SOURCE, "OPTIONS": {"PATH": str(self.document_file)}},
        }
        document = {
            "format": 1, "version": 1, "nodes": {}, "groups": {"photos": {"RANGES": ranges}},
        }  # fmt: skip
        replace_file(self.document_file, json.dumps(document))
        self.save()
        create_once(folder, _content_by_name, self._make_databases)
        if nodes:
            self.manage("migrate_shards", "--create")

    def _make_databases(self) -> None:
        for alias in ("default", "directory"):
            self.manage("migrate", "--database", alias)
        self.manage("migrate_shards", "--create")

    def move_to_zookeeper(self, zookeeper: ZooKeeperServer) -> None:
        """Have processes that start from now on read the topology from ZooKeeper."""
        self.setting["TOPOLOGY"] = {
            "SOURCE": "zookeeper",
            "OPTIONS": {"HOSTS": zookeeper.hosts, "LAST_GOOD": str(self.folder / "last_good")},
        }
        self.save()
        # A process starts with this copy while ZooKeeper has no document.
        (self.folder / "last_good").write_text(self.document_file.read_text())
        self.manage("topology", "push", str(self.document_file))

    def save(self) -> None:
        databases = {
            alias: {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(self.folder / f"{alias}.sqlite3"),
                "OPTIONS": {"timeout": PATIENCE},
            }
            for alias in ("default", "directory")
        }
        content = {"databases": databases, "sharded_orm": self.setting, "caches": {}}
        (self.folder / "site.json").write_text(json.dumps(content))

    def start(self, *arguments: str, **environment: str) -> PythonProcess:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTEST"))}
        file = str(self.folder / "site.json")
        return PythonProcess(
            ["-m", "tests.integration.promotion.project", file, *arguments],
            cwd=ROOT,
            env={**inherited, **environment},
            prepared=prepared_by(prepare),
        )

    def manage(self, *arguments: str, code: int = 0, **environment: str) -> Done:
        """Run a command of ``manage.py``; it must exit with the status ``code``."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return Done(process.returncode, out, err)

    def grow(self, *arguments: str, code: int = 0, **environment: str) -> Done:
        """``shards grow photos --count 2 --primary two …``."""
        return self.manage(
            "shards", "grow", "photos", "--count", "2", "--primary", "two", *arguments,
            code=code, **environment,
        )  # fmt: skip

    def grow_and_die(self, where: str, *arguments: str) -> None:
        self.grow(*arguments, code=-signal.SIGKILL, KILL_AT=where)

    def run(self, code: str) -> Any:
        """Run Python in a process of the site and return its ``answer``, passed as JSON."""
        text = f"{PREAMBLE}\n{code}\nprint(json.dumps(answer))"
        return json.loads(self.manage("shell", "-v", "0", "-c", text).out)

    # ##### The state of the site #####

    def ranges(self) -> list[dict[str, Any]]:
        document = json.loads(self.document_file.read_text())
        ranges: list[dict[str, Any]] = document["groups"]["photos"]["RANGES"]
        return ranges

    def bounds(self) -> list[Any]:
        document = json.loads(self.document_file.read_text())
        bounds: list[Any] = document["groups"]["photos"]["STRATEGY_OPTIONS"]["BOUNDS"]
        return bounds

    def files(self) -> list[str]:
        """Return the names of the shards that exist on node ``two``."""
        return sorted(path.stem for path in (self.folder / "two").glob("*.sqlite3"))

    def migrations(self, number: int) -> list[str]:
        """Return the migrations of ``entries`` on a shard of node ``two``, one entry per run."""
        path = self.folder / "two" / f"photos_{number:05d}.sqlite3"
        connection = sqlite3.connect(path)
        rows = connection.execute(
            "SELECT name FROM django_migrations WHERE app = 'entries' ORDER BY id"
        ).fetchall()
        connection.close()
        return [name for (name,) in rows]

    def wait_for_scatter(self, shards: int) -> None:
        """Return when the scattering process has queried that many shards."""
        end = time.monotonic() + PATIENCE
        while str(shards) not in self.scattered():
            assert time.monotonic() < end
            time.sleep(0.02)  # between two looks at its file

    def scattered(self) -> list[str]:
        try:
            return (self.folder / "scattered").read_text().split()
        except FileNotFoundError:
            return []
