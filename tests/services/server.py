"""The common part of private servers of every kind: a folder, a port, a keeper."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from tests.patience import PATIENCE
from tests.services import keeper

# Seconds that a child has to end by itself before it is signalled again, or killed.
GRACE = 10.0
HOST = "127.0.0.1"
#: The environment variable with the folder of data templates that several processes share.
TEMPLATES = "SHARDED_ORM_TEST_TEMPLATES"


class DataTemplate:
    """A data folder that is made once and then copied: most servers start so faster.

    Once in a process or, if :data:`TEMPLATES` names a folder, once for all processes with that folder.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    def folder(self, server: PrivateServer) -> Path:
        """Return the folder with the template; the first call has ``server`` make it."""
        if self._folder is None:
            name = server.service.lower()
            if shared := os.environ.get(TEMPLATES):
                self._folder = _made_once(server, Path(shared), name)
            else:
                self._folder = _made(server, Path(tempfile.mkdtemp(prefix=f"{name}-template-")))
                atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def _made(server: PrivateServer, folder: Path) -> Path:
    if server.account is not None:
        os.chown(folder, *server.account)
    server._make_template(folder)
    # Logs of databases are mostly empty. Where the template has holes for that, its copies need half the time.
    full, data = folder / "full", folder / "data"
    data.rename(full)
    server._copy(full, data)
    shutil.rmtree(full)
    return folder


def _made_once(server: PrivateServer, parent: Path, name: str) -> Path:
    with open(parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = parent / name
        if not folder.exists():
            # One that was broken off keeps its temporary name.
            _made(server, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))).rename(folder)
    return folder


class PrivateServer(ABC):
    """A private server. A test may kill it and start it again.

    The port and the data stay the same over :meth:`kill` and :meth:`start`. Use as a context
    manager, or call :meth:`close`. The server ends with this process, however this process ends
    (see ``keeper``).
    """

    service: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    #: User and group that own the folder and run the server, if not ours.
    account: tuple[int, int] | None = None

    def __init__(self, **options: str | None) -> None:
        """Create the data folder and start the server. Returns at once, see :meth:`wait_ready`.

        :param options: more options of the server, e.g. ``wait_timeout="2"``.
        :raises ServiceMissing: the server is not installed.
        """
        self._find_programs()
        self.port = free_port()
        self.password = secrets.token_hex(8)
        self.pid: int | None = None
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.service.lower()}-"))
        with contextlib.ExitStack() as on_error:
            on_error.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self.account is not None:
                os.chown(self.folder, *self.account)
            self._install()
            self._keeper = subprocess.Popen(
                [sys.executable, keeper.__file__, str(self.folder), *self._command(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C reaches us, not the servers
            )
            on_error.pop_all()
        self.start(wait=False)

    @abstractmethod
    def _find_programs(self) -> None:
        """Find the programs to run.

        :raises ServiceMissing: a program is not installed.
        """

    @abstractmethod
    def _install(self) -> None:
        """Fill the folder. Runs once, before the first start."""

    @abstractmethod
    def _command(self, options: dict[str, str | None]) -> list[str]:
        """Return the command that runs the server in the foreground on ``self.port``."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a client that connects now is served."""

    def _make_template(self, folder: Path) -> None:
        """Make the data of a new server in the folder ``data`` of ``folder``, which may be renamed later."""
        raise NotImplementedError

    def _copy_template(self, template: DataTemplate) -> Path:
        """Copy the data of ``template`` into the folder, and return the copy."""
        copy = self.folder / "data"
        self._copy(template.folder(self) / "data", copy)
        return copy

    def _copy(self, data: Path, to: Path) -> None:
        self._run_installer(["cp", "-r", "--sparse=always", str(data), str(to)])

    def _run_installer(
        self, command: list[str], env: dict[str, str] | None = None, text: str = ""
    ) -> None:
        as_account: dict[str, Any] = {}
        if self.account is not None:
            user, group = self.account
            as_account = {"user": user, "group": group, "extra_groups": []}
        result = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **as_account,
        )
        if result.returncode:
            name = Path(command[0]).name
            raise RuntimeError(f"{name} failed ({result.returncode}):\n{result.stdout}")

    # ##### Start and end #####

    def _order(self, what: str) -> str:
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            raise RuntimeError("this server was closed")
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(what + "\n")
        self._keeper.stdin.flush()
        return self._keeper.stdout.readline().strip()

    def start(self, wait: bool = True) -> None:
        """Start the server (again) on the same port with the same data."""
        if self.pid is not None:
            raise RuntimeError("this server runs already")
        answer = self._order("start")
        if not answer.startswith("pid "):
            raise RuntimeError(f"the keeper of the server ended: {answer!r}")
        self.pid = int(answer.removeprefix("pid "))
        if wait:
            self.wait_ready()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end: a crash, from a client's view."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut the server down in order."""
        self._end(self.stop_signal)

    def _end(self, how: signal.Signals) -> None:
        self._order(f"end {how:d}")
        self.pid = None

    def pause(self) -> None:
        """Send SIGSTOP to all processes of the server.

        Existing and new connections stay open, and nothing answers. Returns when the processes have
        stopped. Until :meth:`resume` the server can be killed, but not stopped.
        """
        for pid in self._signal_all(signal.SIGSTOP):
            while _state(pid) not in "TZX":
                time.sleep(0.001)  # the kernel reports it to the parent only

    def resume(self) -> None:
        """Send SIGCONT to the processes that :meth:`pause` has stopped."""
        for _ in self._signal_all(signal.SIGCONT):
            pass

    def _signal_all(self, how: signal.Signals) -> Iterator[int]:
        if self.pid is None:
            raise RuntimeError("this server does not run")
        os.kill(self.pid, how)
        yield self.pid
        # Listed after the parent was signalled: a stopped parent starts no more children.
        for pid in keeper.children_of(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
                yield pid

    def wait_ready(self) -> None:
        """Return when the server serves clients.

        :raises RuntimeError: the server does not become ready; the message is its log.
        """
        assert self.pid is not None
        end = time.monotonic() + PATIENCE
        while not self.is_ready():
            if time.monotonic() > end or not runs(self.pid):
                log = (self.folder / "output.log").read_text(errors="replace")
                self.close()
                raise RuntimeError(f"{self.service} did not start on port {self.port}:\n{log}")
            time.sleep(0.05)  # between two attempts to connect

    def close(self) -> None:
        """End the server and remove its folder. May be called twice."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        self.pid = None

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


AnyServer = TypeVar("AnyServer", bound=PrivateServer)


@contextlib.contextmanager
def running(kind: type[AnyServer], count: int, **options: str | None) -> Iterator[list[AnyServer]]:
    """Start ``count`` servers of a kind at the same time and yield them when they are ready.

    :raises ServiceMissing: the server is not installed.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            started.append(server := kind(**options))
            stack.callback(server.close)
        for server in started:
            server.wait_ready()
        yield started


def free_port() -> int:
    """Return a port on which nothing listens, and which no other process of the tests gets.

    The port stays reserved for this process, also while its server is down.
    """
    # Below the range from which the kernel takes ports for outgoing connections. One of those could
    # take the port before the server does, or while the server is down.
    while True:
        port = 20000 + secrets.randbelow(12000)
        # An abstract name of Linux: one process has it, and it is free when that process ends.
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            reservation.bind(f"\0tests of sharded_orm, port {port}")
            with socket.socket() as probe:
                probe.bind((HOST, port))
        except OSError:
            reservation.close()
            continue
        reservation.detach()  # stays open
        return port


def runs(pid: int) -> bool:
    """Whether the process ``pid`` exists and has not ended."""
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; ``X`` if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def run_to_end(command: list[str], environment: dict[str, str]) -> int:
    """Run ``command`` and return its exit code. It is interrupted and ends with us."""
    child = subprocess.Popen(
        command,
        env=environment,
        preexec_fn=functools.partial(keeper.die_with_parent, signal.SIGTERM),
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        # A terminal has sent the signal to the child as well, which now cleans up; kill has not.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(GRACE)
        child.send_signal(signal.SIGINT)
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
