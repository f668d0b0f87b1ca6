"""The photo site as a browser finds it: prepared, and served in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from tests.acceptance.browser.chrome import Browser
from tests.acceptance.project import ROOT, Project, on_servers
from tests.services import keeper
from tests.services.mariadb import servers
from tests.services.server import HOST, free_port

#: The node of shards that may go down: the other has the global database, too, on MariaDB.
FRAGILE = "node_2"

_LOGIN = re.compile(r"Login for both:\s+(\S+) / (\S+)")


class Node(Protocol):
    """What has shards, and may be killed and started again."""

    def kill(self) -> None: ...
    def start(self) -> None: ...


class Folder:
    """A node on SQLite. Killed, its folder is elsewhere, as if a disk were not mounted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._elsewhere = path.with_name(f"{path.name}-unmounted")

    def kill(self) -> None:
        self._path.rename(self._elsewhere)

    def start(self) -> None:
        self._elsewhere.rename(self._path)


@dataclass(frozen=True)
class Site:
    """A site that is up, and the login of who may do everything there."""

    backend: str
    address: str
    user: str
    password: str
    project: Project
    node: Node

    @contextmanager
    def node_down(self) -> Iterator[None]:
        """Kill ``FRAGILE`` for the block."""
        self.node.kill()
        try:
            yield
        finally:
            self.node.start()


@contextmanager
def site_on(backend: str, folder: Path) -> Iterator[Site]:
    """A site with sample content, on files or on two MariaDB servers of its own.

    :param folder: of its own; gets the server's output (``server.log``) as well.
    :raises ServiceMissing: MariaDB is not installed.
    """
    with ExitStack() as stack:
        project = Project(backend, folder)
        node: Node = Folder(folder / FRAGILE)
        if backend == "mariadb":
            # What was committed outlives the process, unlike with the option of other tests.
            nodes = stack.enter_context(servers(2, innodb_flush_log_at_trx_commit="2"))
            project.variables = on_servers([server.address for server in nodes], "site_")
            node = nodes[1]
        folder.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context((folder / "server.log").open("w", buffering=1, encoding="utf-8"))
        address, user, password = stack.enter_context(_serving(project, log))
        yield Site(backend, address, user, password, project, node)


def log_in(browser: Browser, site: Site) -> None:
    """From a page that asks for a login to the page behind it."""
    browser.fill(username=site.user, password=site.password)
    browser.follow("[type=submit], button.main")
    # The list of all models, which leaves less room for what is looked at.
    browser.driver.execute_script("localStorage['django.admin.navSidebarIsOpen'] = 'false'")


@contextmanager
def _serving(project: Project, log: TextIO) -> Iterator[tuple[str, str, str]]:
    """``manage.py demo``, which prepares the site first; yields address, user and password."""
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
            rest = threading.Thread(target=log.writelines, args=[output])
            rest.start()
            yield f"http://{HOST}:{port}", user, password
        finally:
            process.kill()
    rest.join()


def _wait_until_it_listens(output: TextIO, log: TextIO) -> tuple[str, str]:
    said = []
    for line in output:
        log.write(line)
        said.append(line)
        if found := _LOGIN.search(line):
            return found[1], found[2]
    raise RuntimeError(f"the site did not start:\n{''.join(said)}")
