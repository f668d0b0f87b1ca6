"""The topology source for ZooKeeper, which notifies every process of a change (Pinterest, P2).

The source stores these znodes (entries in ZooKeeper's tree) below the path of the option ``PATH``::

    current               the document; replaced by compare-and-set on the version of the znode
    history/0000000007    version 7 of the document, with author, time and comment; only the latest
                          versions are kept
    processes/…           an ephemeral znode for each connected process, with the version it uses
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, ClassVar

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConfigurationError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState
from kazoo.security import ACL, make_acl

from sharded_orm.exceptions import (
    InvalidConfiguration,
    InvalidTopology,
    TopologyConflict,
    TopologyUnavailable,
)
from sharded_orm.forks import identity
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import (
    OnChange,
    Process,
    Revision,
    TopologySource,
    arrived,
    author,
    parsed_time,
    positive,
    version_of,
)

logger = logging.getLogger("sharded_orm.topology")

# The maximum size of a document, in bytes. ZooKeeper's limit for a request (jute.maxbuffer) is 1
# MiB by default, and the request that publishes a document contains it twice.
MAX_BYTES = 450_000
_PERMISSIONS = {"c": "create", "d": "delete", "r": "read", "w": "write", "a": "admin"}
# A kazoo client without a connection for this many seconds is replaced by a new one. A client that
# ZooKeeper refuses permanently (because of authentication, or a server restored from an older
# backup) would never connect again.
_RENEW_AFTER = 60.0
# The number of seconds after which a read of the document is repeated, if the read has failed
# although the connection is open.
_REPEAT_AFTER = 1.0
# The number of seconds after which a read of the document is repeated, if it has failed with an
# unexpected error. It is more than _REPEAT_AFTER, because such an error will probably occur again.
_RECOVER_AFTER = 5.0
# The maximum number of seconds for which stop() waits for the end of the watching thread. After
# that, stop() returns even if the thread still runs.
_END_WITHIN = 3.0
# How kazoo repeats attempts to connect: without end, with at most 2 seconds between two attempts.
# By default, kazoo would increase this pause up to an hour.
_RECONNECT = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 2.0}


class ZooKeeperSource(TopologySource):
    """A topology source that stores the document in ZooKeeper; the module's docstring lists the znodes.

    A background thread reads the document and reports changes, so code that uses the topology never
    waits for the network.
    """

    writable: ClassVar[bool] = True
    pushes: ClassVar[bool] = True
    option_names = frozenset(
        {"HOSTS", "PATH", "TIMEOUT", "WAIT", "AUTH", "ACL", "HISTORY", "CLIENT"}
    )
    required = frozenset({"HOSTS", "LAST_GOOD"})

    def __init__(self, options: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        super().__init__(options, setting)
        problems: list[str] = []
        hosts = options["HOSTS"]
        self._hosts = hosts if isinstance(hosts, str) else ",".join(map(str, hosts))
        self._path = str(options.get("PATH", "/sharded_orm")).rstrip("/")
        if not self._path.startswith("/"):
            problems.append(f"TOPOLOGY: PATH must begin with '/', not {options.get('PATH')!r}")
        self._timeout = positive("TIMEOUT", options.get("TIMEOUT", 10.0), problems)
        self._wait = positive("WAIT", options.get("WAIT", 5.0), problems)
        self._kept = int(positive("HISTORY", options.get("HISTORY", 100), problems))
        self._acl = _acl(options.get("ACL", ()), problems)
        try:
            self._arguments = {
                "connection_retry": dict(_RECONNECT),
                **options.get("CLIENT", {}),
                "auth_data": [
                    (scheme, credential) for scheme, credential in options.get("AUTH", ())
                ],
            }
            self._make_client()
        except (TypeError, ValueError, ConfigurationError) as exc:
            # Report only the type of the exception, because its text may contain the credentials in
            # AUTH.
            problems.append(
                "TOPOLOGY: kazoo's client cannot be made with HOSTS, AUTH and CLIENT"
                f" ({type(exc).__name__}); AUTH is a list of (scheme, credential), CLIENT a dict"
                " of its arguments"
            )
        if problems:
            raise InvalidConfiguration(problems)
        self._process = identity()
        self._lock = threading.Lock()
        self._client: KazooClient | None = None
        self._thread: threading.Thread | None = None
        self._on_change: OnChange | None = None
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._lost = False
        self._last_connected = time.monotonic()
        #: The id (mzxid) of the ZooKeeper transaction that wrote the last reported document; None before
        #: the first report.
        self._reported: int | None = None
        self._version = 0
        self._since = datetime.now(UTC)
        #: A pair: the id of the ZooKeeper session in which this process has written its znode below
        #: ``processes``, and the topology version that it has written. None if there is no such
        #: znode.
        self._announced: tuple[int, int] | None = None
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    def describe(self) -> str:
        return f"ZooKeeper at {self._hosts}, {self._path}"

    # ##### Reading and writing, in the thread of the caller #####

    def load(self) -> Document | None:
        with self._connected() as client:
            # Sync before reading, because the ZooKeeper server of this connection may lag behind
            # the leader.
            self._ask(client.sync_async(self._path))
            current = self._read(client)
        return None if current is None else _parse(current[0])

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        payload = document.to_json().encode()
        if len(payload) > MAX_BYTES:
            raise InvalidTopology(
                [f"it has {len(payload):,} bytes; ZooKeeper takes {MAX_BYTES:,} at most"]
            )
        record = {
            "published_at": datetime.now(UTC).isoformat(),
            "by": author(),
            "comment": comment,
            "document": document.content(),
        }
        with self._connected() as client:
            self._ask(client.ensure_path_async(f"{self._path}/history", acl=self._acl))
            current = self._read(client)
            version = None if current is None else version_of(current[0])
            if version is not None and version != expected:
                raise TopologyConflict(
                    f"{self.describe()} holds version {version} by now, not {expected} any more;"
                    " nothing was published."
                )
            entry = f"{self._path}/history/{document.version:010d}"
            change = client.transaction()
            # The history may already have an entry for this version, if somebody has written an
            # older version into the znode 'current' by hand. Replace this entry.
            if self._ask(client.exists_async(entry)) is None:
                change.create(entry, json.dumps(record).encode(), acl=self._acl)
            else:
                change.set_data(entry, json.dumps(record).encode())
            if current is None:
                change.create(f"{self._path}/current", payload, acl=self._acl)
            else:
                change.set_data(f"{self._path}/current", payload, version=current[1].version)
            for result in self._ask(change.commit_async()):
                if isinstance(result, (BadVersionError, NodeExistsError, NoNodeError)):
                    raise TopologyConflict(
                        f"{self.describe()} was changed by somebody else at this moment; nothing"
                        " was published."
                    )
                if isinstance(result, NoAuthError):
                    raise result
            self._trim(client)

    def history(self, limit: int) -> list[Revision]:
        with self._connected() as client:
            records = []
            for name in self._entries(client)[:limit]:
                # Skip an entry that is missing, because another process has just deleted it as too
                # old.
                with suppress(NoNodeError):
                    data, _ = self._ask(client.get_async(f"{self._path}/history/{name}"))
                    records.append((int(name), json.loads(data)))
        return [
            Revision(
                version, parsed_time(record.get("published_at")), record["by"], record["comment"]
            )
            for version, record in records
        ]

    def revision(self, version: int) -> Document:
        with self._connected() as client:
            entry = f"{self._path}/history/{version:010d}"
            try:
                data, _ = self._ask(client.get_async(entry))
            except NoNodeError as exc:
                raise LookupError(f"{self.describe()} keeps no version {version!r}.") from exc
        return Document.from_content(json.loads(data)["document"])

    def processes(self) -> list[Process]:
        processes = []
        with self._connected() as client:
            folder = f"{self._path}/processes"
            try:
                names = self._ask(client.get_children_async(folder))
            except NoNodeError:
                return []
            answers = [client.get_async(f"{folder}/{name}") for name in names]
            for name, answer in zip(names, answers, strict=True):
                # Skip a process that has ended since the names were read, and an invalid record.
                with suppress(NoNodeError, ValueError, KeyError):
                    record = json.loads(self._ask(answer)[0])
                    since, own = parsed_time(record["since"]), name == self._name
                    processes.append(
                        Process(record["host"], record["pid"], record["version"], since, own)
                    )
        return sorted(processes, key=lambda process: (process.host, process.pid))

    def _entries(self, client: KazooClient) -> list[str]:
        try:
            names = self._ask(client.get_children_async(f"{self._path}/history"))
        except NoNodeError:
            return []
        return sorted((name for name in names if name.isascii() and name.isdigit()), reverse=True)

    def _trim(self, client: KazooClient) -> None:
        for name in self._entries(client)[self._kept :]:
            with suppress(NoNodeError):
                self._ask(client.delete_async(f"{self._path}/history/{name}"))

    def _read(
        self, client: KazooClient, watch: Callable[[Any], None] | None = None
    ) -> tuple[bytes, Any] | None:
        path = f"{self._path}/current"
        while True:
            try:
                data, stat = self._ask(client.get_async(path, watch=watch))
            except NoNodeError:
                # The znode is missing, so get_async() has set no watch (a request to be notified of
                # a change), and the first document would not be noticed. exists_async() sets a
                # watch even on a missing znode.
                if self._ask(client.exists_async(path, watch=watch)) is None:
                    return None
                continue
            return (data, stat) if data else None

    @contextmanager
    def _connected(self) -> Iterator[KazooClient]:
        """Context manager that waits for a connection and yields the connected kazoo client.

        Exceptions of the client inside the block become :exc:`TopologyUnavailable`.
        """
        client = self._started()
        # Wait for a connection: kazoo's event _live is set while kazoo is connected.
        if not client._live.wait(self._wait):
            raise TopologyUnavailable(f"{self.describe()} does not answer within {self._wait:g} s.")
        try:
            yield client
        except NoAuthError as exc:
            raise TopologyUnavailable(
                f"{self.describe()} does not allow this: its ACL wants another AUTH of TOPOLOGY."
            ) from exc
        except (KazooException, KazooTimeoutError) as exc:
            raise TopologyUnavailable(
                f"{self.describe()} did not answer: {type(exc).__name__} {exc}".rstrip() + "."
            ) from exc

    def _ask(self, result: Any) -> Any:
        return result.get(timeout=self._wait)

    def _make_client(self) -> KazooClient:
        return KazooClient(hosts=self._hosts, timeout=self._timeout, **self._arguments)

    def _started(self) -> KazooClient:
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
                self._client.add_listener(self._state_changed)
                self._client.start_async()
                self._last_connected = time.monotonic()
            return self._client

    # ##### Watching, in a separate thread #####

    def start(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._thread = threading.Thread(target=self._follow, name="topology-zookeeper", daemon=True)
        self._thread.start()

    def using(self, version: int) -> None:
        self._version, self._since = version, datetime.now(UTC)
        self._wake.set()

    def stop(self) -> None:
        if self._process != identity():
            return  # Do nothing in a forked child, which must not write to its parent's socket.
        self._ended.set()
        self._wake.set()
        self._drop_client()
        if self._thread is not None and self._thread is not threading.current_thread():
            # Wait only for a limited time, because the watching thread may wait for an answer that
            # never comes.
            self._thread.join(_END_WITHIN)
            # Drop the client again: the watching thread may have created a new client meanwhile.
            self._drop_client()

    def _drop_client(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.remove_listener(self._state_changed)
            try:
                client.stop()
                client.close()
            except Exception:
                # Ignore every exception, because kazoo may raise one if it is stopped while it
                # connects.
                logger.debug("stopping the client of %s", self.describe(), exc_info=True)

    def _follow(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            try:
                pause = self._step()
            except (KazooException, KazooTimeoutError) as exc:
                logger.debug("reading from %s: %r", self.describe(), exc)
                pause = _REPEAT_AFTER
            except Exception:
                # Catch every exception, so that this thread does not end. No other thread watches
                # the topology document.
                logger.exception("Following %s failed, and goes on.", self.describe())
                pause = _RECOVER_AFTER
            self._wake.wait(pause)

    def _step(self) -> float:
        """Read the document if the client is connected.

        Drop the client if it has had no connection for :data:`_RENEW_AFTER` seconds. The next call
        creates a new one. Return the number of seconds for which the watching thread should sleep
        before the next call. A change in ZooKeeper may wake the thread earlier.
        """
        client = self._started()
        if client.connected:
            self._last_connected = time.monotonic()
            self._look(client)
        elif time.monotonic() > self._last_connected + _RENEW_AFTER:
            self._drop_client()
            return 0.0
        return _RENEW_AFTER

    def _look(self, client: KazooClient) -> None:
        """Read the topology document from ZooKeeper. If it is new, pass it to the callback of the
        watcher.

        Then write to ZooKeeper which version of the document this process uses.
        """
        assert self._on_change is not None
        current = self._read(client, self._changed)
        if current is not None and current[1].mzxid != self._reported:
            data, stat = current
            if (document := arrived(lambda: _parse(data))) is not None:
                self._on_change(document)
            self._reported = stat.mzxid
        self._announce(client)

    def _changed(self, event: object) -> None:
        self._wake.set()

    def _state_changed(self, state: str) -> None:
        # kazoo, the ZooKeeper client, calls this method in its connection thread. So the method
        # must not wait.
        if state == KazooState.CONNECTED:
            if self._lost:
                logger.info("%s answers again.", self.describe())
            self._lost = False
        elif not self._lost and not self._ended.is_set():
            self._lost = True
            logger.warning(
                "%s is lost; this process goes on with version %d of the topology.",
                self.describe(), self._version,
            )  # fmt: skip
        self._wake.set()

    def _announce(self, client: KazooClient) -> None:
        session = client.client_id
        if session is None or self._announced == (session[0], self._version):
            return
        version = self._version
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": version,
            "since": self._since.isoformat(),
        }
        path, data = f"{self._path}/processes/{self._name}", json.dumps(record).encode()
        try:
            if self._announced is not None and self._announced[0] == session[0]:
                self._ask(client.set_async(path, data))
            else:
                self._ask(client.ensure_path_async(f"{self._path}/processes", acl=self._acl))
                # Delete the znode that this process has written in an earlier session. It has the
                # same path as the new znode, and ZooKeeper itself deletes it only when the earlier
                # session ends, which may be later.
                with suppress(NoNodeError):
                    self._ask(client.delete_async(path))
                self._ask(client.create_async(path, data, acl=self._acl, ephemeral=True))
        except NoNodeError:
            # Somebody has deleted the znode of this process by hand. The next call of this method
            # creates it again.
            self._announced = None
            return
        except NoAuthError:
            logger.info("%s does not allow this process to tell its version.", self.describe())
        self._announced = (session[0], version)


def _acl(entries: Any, problems: list[str]) -> list[ACL] | None:
    """Return the access rights in ``entries`` (a ZooKeeper ACL) as kazoo's objects.

    Each entry is ``(scheme, id, permissions)``, such as ``("world", "anyone", "r")``. Return None
    if no entry is valid. For each invalid entry, add a sentence to ``problems``.
    """
    acl = []
    for entry in entries:
        match entry:
            case (str() as scheme, str() as who, str() as letters) if {*letters} <= {*_PERMISSIONS}:
                acl.append(
                    make_acl(scheme, who, **{_PERMISSIONS[letter]: True for letter in letters})
                )
            case _:
                # Do not put the entry into the message, because it may contain the digest of a
                # password.
                problems.append(
                    "TOPOLOGY: each of ACL must be (scheme, id, permissions), the last of letters"
                    f" {''.join(_PERMISSIONS)!r}"
                )
    return acl or None


def _parse(data: bytes) -> Document:
    return Document.from_json(data)
