"""The base class of topology sources, from which all processes load the topology document.

Sources are pluggable: ``SHARDED_ORM["TOPOLOGY"]["SOURCE"]`` is the name of a built-in source or the
dotted path of a subclass of :class:`TopologySource`.
"""

from __future__ import annotations

import getpass
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from django.utils.module_loading import import_string

from sharded_orm.exceptions import (
    InvalidConfiguration,
    InvalidTopology,
    TopologyError,
    TopologyReadOnly,
)
from sharded_orm.topology.document import Document

BUILT_IN = {
    "static": "sharded_orm.topology.sources.static.StaticSource",
    "file": "sharded_orm.topology.sources.file.FileSource",
    "database": "sharded_orm.topology.sources.database.DatabaseSource",
    "zookeeper": "sharded_orm.topology.sources.zookeeper.ZooKeeperSource",
}

#: The type of the function to which a source passes each new document. If a document cannot be
#: read, the source passes an error instead. A source may call the function in any thread. The
#: function must return quickly and must not raise an exception.
OnChange = Callable[[Document | TopologyError], None]


@dataclass(frozen=True)
class Revision:
    """An entry of a source's history: which version was published, when, by whom, and why."""

    version: int
    published_at: datetime | None
    by: str
    comment: str


@dataclass(frozen=True)
class Process:
    """A process that is connected to the topology source, and the topology version that it uses."""

    host: str
    pid: int
    version: int
    since: datetime | None
    #: True for the process that has requested the list of processes, False for all others.
    own: bool = False


def arrived(read: Callable[[], Document | None]) -> Document | TopologyError | None:
    """Return the result of ``read``, or a :exc:`TopologyError` if it raises an exception.

    The thread that watches a source calls this function, because no exception must end that thread.
    The thread then passes the result to an :data:`OnChange` function, unless the result is None.
    """
    try:
        return read()
    except TopologyError as exc:
        return exc
    except Exception as exc:
        return InvalidTopology([f"it cannot be read: {type(exc).__name__}: {exc}"])


def author() -> str:
    """Return the author of a publication, for the history: the account and the host of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # The user id has no name, as in many containers.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def parsed_time(text: Any) -> datetime | None:
    """Return the time that ``text`` contains in ISO format; None if it contains no such time."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


def version_of(text: str | bytes) -> int | None:
    """Return the version of the document in ``text``; None if ``text`` is not a document.

    A source compares this version with the version that a publication expects to replace. If None
    is returned, there is nothing to compare, and the publication replaces ``text``.
    """
    try:
        return Document.from_json(text).version
    except InvalidTopology:
        return None


def positive(name: str, value: Any, problems: list[str]) -> float:
    """Return the value of the option ``name``, a number of seconds, as a float.

    If the value is not a valid number of seconds, add a sentence to ``problems`` and return 1.0.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= threading.TIMEOUT_MAX:
        problems.append(f"TOPOLOGY: {name} must be a positive number, not {value!r}")
        return 1.0
    return float(value)


class TopologySource(ABC):
    """The base class of topology sources. A source reads the topology document where it is stored.

    An instance serves one process. A source raises an error for content that is no topology
    document at all. But it does not check whether the topology in a document is valid, so it may
    return an invalid one. The caller decides whether to use the document.

    :param options: ``SHARDED_ORM["TOPOLOGY"]["OPTIONS"]``.
    :param setting: the whole setting ``SHARDED_ORM``.
    :raises InvalidConfiguration: an option is unknown, missing or of the wrong type.
    """

    #: Whether the source supports :meth:`publish`.
    writable: ClassVar[bool] = False
    #: Whether the topology document can change while the process runs.
    live: ClassVar[bool] = True
    #: Whether the source tells all processes of a change at once. If False, each process has to ask
    #: from time to time.
    pushes: ClassVar[bool] = False
    #: Names of the options that this class accepts, in addition to :data:`COMMON`, the options of
    #: every source.
    option_names: ClassVar[frozenset[str]] = frozenset()
    #: Names of the options in :attr:`option_names` that must be set.
    required: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        self.options = options
        self.setting = setting
        valid = {*self.option_names, *COMMON}
        problems = [
            f"TOPOLOGY: unknown option {name!r}; this source takes {sorted(valid)!r}"
            for name in options
            if name not in valid
        ]
        problems += [
            f"TOPOLOGY: this source needs the option {name!r}"
            for name in sorted(self.required)
            if not options.get(name)
        ]
        if not isinstance(options.get("CREDENTIALS", False), bool):
            problems.append("TOPOLOGY: CREDENTIALS must be True or False")
        if problems:
            raise InvalidConfiguration(problems)

    @property
    def last_good(self) -> str | None:
        """The path of the file in which the last valid document is saved (the option LAST_GOOD).

        A process can start with this file if the source does not answer. The path is None if the
        option is not set. Then no file is saved.
        """
        path = self.options.get("LAST_GOOD")
        return str(path) if path else None

    @property
    def allows_credentials(self) -> bool:
        """Whether documents may contain credentials (the option CREDENTIALS)."""
        return bool(self.options.get("CREDENTIALS", False))

    @abstractmethod
    def describe(self) -> str:
        """Return the address or the path of the source, without credentials, for messages."""

    @abstractmethod
    def load(self) -> Document | None:
        """Return the current document of the source; None if no document was ever published.

        Waits for an answer for as long as the source's options allow.

        :raises TopologyUnavailable: the source does not answer.
        :raises InvalidTopology: the source's content is not a document.
        """

    def start(self, on_change: OnChange) -> None:  # noqa: B027  # not needed for a constant source
        """Call ``on_change`` with the current document, and from now on with each later document.

        Returns at once. If the connection to the source is lost, the instance tries to reconnect in
        the background until :meth:`stop` is called. Do not call this method twice on an instance. A
        forked child must create its own instance.
        """

    def stop(self) -> None:  # noqa: B027  # as start()
        """End the background work of :meth:`start`, and close all connections.

        May be called twice.
        """

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        """Replace the source's document in one atomic step, if it has the version ``expected``.

        This method does not check whether processes may use ``document``; the caller does, see
        ``operations/topology.py``.

        :param expected: the version of the document to be replaced; 0 if the source should not have
            a document yet.
        :param comment: a text that is stored in the source's history; by default empty.
        :raises TopologyConflict: the version in the source is not ``expected``.
        :raises TopologyReadOnly: the source cannot be written.
        :raises TopologyUnavailable: the source does not answer; the document may or may not have
            been published.
        """
        raise TopologyReadOnly(f"{self.describe()} cannot be written by this command.")

    def history(self, limit: int) -> list[Revision]:
        """Return the last ``limit`` entries of the source's history, newest first.

        Return an empty list if the source keeps no history.
        """
        return []

    def revision(self, version: int) -> Document:
        """Return the document that was published as ``version``.

        :raises LookupError: the history does not contain that version.
        """
        raise LookupError(f"{self.describe()} keeps no version {version!r}.")

    def using(self, version: int) -> None:  # noqa: B027  # most sources do not record the version
        """Tell the source that this process now uses ``version``, so that :meth:`processes` can
        report it.

        Returns at once.
        """

    def processes(self) -> list[Process] | None:
        """Return the processes that are connected to the source; None if they are unknown."""
        return None


#: Names of the options that every source accepts.
COMMON = frozenset({"LAST_GOOD", "CREDENTIALS"})


def make_source(
    path: str, options: Mapping[str, Any], setting: Mapping[str, Any]
) -> TopologySource:
    """Return a new source of the class at ``path``, without connecting to it.

    :param path: a key of :data:`BUILT_IN`, or the dotted path of a :class:`TopologySource`.
    :raises InvalidConfiguration: there is no such class, or an option is wrong. The message lists the
        permitted values.
    """
    try:
        cls = import_string(BUILT_IN.get(path, path))
    except ImportError as exc:
        raise InvalidConfiguration(
            [
                f"TOPOLOGY: SOURCE {path!r} cannot be imported ({exc}); use one of"
                f" {sorted(BUILT_IN)!r} or a dotted path"
            ]
        ) from exc
    if not (isinstance(cls, type) and issubclass(cls, TopologySource)):
        raise InvalidConfiguration([f"TOPOLOGY: SOURCE {path!r} is not a TopologySource class"])
    return cls(options, setting)
