"""The photo site for a browser: prepared, and served by a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from tests.acceptance.browser.chrome import Browser
from tests.acceptance.project import ROOT, Project, on_servers
from tests.services import keeper, mariadb, postgresql
from tests.services.server import HOST, free_port

#: The node that tests may stop. On MariaDB, the other node has the global database, too.
FRAGILE = "node_2"

_LOGIN = re.compile(r"Login for both:\s+(\S+) / (\S+)")


class Node(Protocol):
    """A node of shards that can be killed and started again."""

    def kill(self) -> None: ...
    def start(self) -> None: ...


class Folder:
    """A node on SQLite. To kill it moves its folder away, as if a disk were not mounted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._elsewhere = path.with_name(f"{path.name}-unmounted")

    def kill(self) -> None:
        self._path.rename(self._elsewhere)

    def start(self) -> None:
        self._elsewhere.rename(self._path)


@dataclass(frozen=True)
class Site:
    """A running site, and the login of its superuser."""

    backend: str
    address: str
    user: str
    password: str
    project: Project
    node: Node

    @contextmanager
    def node_down(self) -> Iterator[None]:
        """Stop the node ``FRAGILE`` for the block."""
        self.node.kill()
        try:
            yield
        finally:
            self.node.start()


@contextmanager
def site_on(backend: str, folder: Path) -> Iterator[Site]:
    """A site with sample content, on files or on two servers of its own.

    :param folder: an empty folder for the site, and for the server's output (``server.log``).
    :raises ServiceMissing: the database server is not installed.
    """
    with ExitStack() as stack:
        project = Project(backend, folder)
        node: Node = Folder(folder / FRAGILE)
        if backend != "sqlite":
            nodes: list[Any] = stack.enter_context(
                # Commits survive the process, unlike with the option of other tests.
                mariadb.servers(2, innodb_flush_log_at_trx_commit="2")
                if backend == "mariadb"
                else postgresql.servers(2)
            )
            addresses = [server.address for server in nodes]
            project.variables = on_servers(addresses, "site_", backend)
            node = nodes[1]
        folder.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context((folder / "server.log").open("w", buffering=1, encoding="utf-8"))
        address, user, password = stack.enter_context(serving(project, log))
        yield Site(backend, address, user, password, project, node)


def log_in(browser: Browser, site: Site) -> None:
    """Log in on a page that asks for it, and wait for the page behind it."""
    browser.fill(username=site.user, password=site.password)
    browser.follow("[type=submit], button.main")
    # Hide the list of all models, which takes room on screenshots.
    browser.driver.execute_script("localStorage['django.admin.navSidebarIsOpen'] = 'false'")


@contextmanager
def serving(project: Project, log: TextIO) -> Iterator[tuple[str, str, str]]:
    """Run ``manage.py demo``, which prepares the site; yield address, user and password."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "demo", "--host", HOST, "--port", str(port)],
        cwd=ROOT,
        env=project.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=keeper.die_with_parent,
    )
    output = process.stdout
    assert output is not None
    with process:
        try:
            user, password = _wait_until_it_listens(output, log)
            copier = threading.Thread(target=log.writelines, args=[output])
            copier.start()
            yield f"http://{HOST}:{port}", user, password
        finally:
            process.kill()
    copier.join()


def _wait_until_it_listens(output: TextIO, log: TextIO) -> tuple[str, str]:
    lines = []
    for line in output:
        log.write(line)
        lines.append(line)
        if match := _LOGIN.search(line):
            return match[1], match[2]
    raise RuntimeError(f"the site did not start:\n{''.join(lines)}")
