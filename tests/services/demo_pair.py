"""The demo on a pair of servers: ``python -m tests.services.demo_pair [ARGUMENTS of manage.py demo]``.

Starts two private MariaDB servers, makes them a pair with the library's own commands, and runs
``manage.py demo``. At its end, the servers and their data are gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testproject.databases import PAIR_NODES, pair_document
from tests.services import ServiceMissing
from tests.services.replication import MasterPair, execute, master_servers
from tests.services.server import run_to_end

ROOT = Path(__file__).parents[2]


@contextmanager
def demo_pair(folder: Path) -> Iterator[tuple[MasterPair, dict[str, str]]]:
    """Start two servers and make them a pair. Yield them and the variables of the demo's environment.

    :param folder: for the files of the site.
    :raises ServiceMissing: MariaDB is not installed.
    """
    with master_servers() as pair:
        for server in (pair.first, pair.second):
            execute(server, "SET GLOBAL read_only = OFF")
        execute(pair.first, "CREATE DATABASE demo_default")
        nodes = [pair.node(server) for server in (pair.first, pair.second)]
        names = ("HOST", "PORT", "USER", "PASSWORD", "OPERATOR", "REPLICATION")
        servers = [{name: node[name] for name in names} for node in nodes]
        variables = {
            "SHARDED_ORM_DEMO_PAIR": json.dumps(servers),
            "SHARDED_ORM_DEMO_DIR": str(folder),
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
        }
        document = folder / "topology.json"
        document.write_text(json.dumps(pair_document()))
        for arguments in (("topology", "push", str(document)), ("pairs", "setup", *PAIR_NODES)):
            subprocess.run(
                [sys.executable, "manage.py", *arguments],
                cwd=ROOT,
                env={**os.environ, **variables},
                check=True,
            )
        yield pair, variables


def main() -> int:
    def interrupt(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="demo-") as folder,
            demo_pair(Path(folder)) as (_, variables),
        ):
            command = [sys.executable, str(ROOT / "manage.py"), "demo", *sys.argv[1:]]
            return run_to_end(command, {**os.environ, **variables})
    except ServiceMissing as exc:
        print(exc, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
