"""The contract of a topology source, which holds the topology document for all processes.

Sources are pluggable: ``SHARDED_ORM["TOPOLOGY"]["SOURCE"]`` names a built-in source or the
dotted path of a subclass of :class:`TopologySource`.
"""

from __future__ import annotations

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
    "zookeeper": "sharded_orm.topology.sources.zookeeper.ZooKeeperSource",
}

#: Called with each document that arrives, or with the error of a document that cannot be read.
#: Called from any thread; returns quickly; never raises.
OnChange = Callable[[Document | TopologyError], None]


@dataclass(frozen=True)
class Revision:
    """One entry of a source's history."""

    version: int
    published_at: datetime | None
    by: str
    comment: str


@dataclass(frozen=True)
class Process:
    """A process that is connected to the source, and the version it uses."""

    host: str
    pid: int
    version: int
    since: datetime | None
    #: Whether it is the process that asks.
    own: bool = False


def arrived(read: Callable[[], Document | None]) -> Document | TopologyError | None:
    """The result of ``read``, or its error, for :data:`OnChange`. Raises nothing.

    So a source goes on watching, whatever it reads.
    """
    try:
        return read()
    except TopologyError as exc:
        return exc
    except Exception as exc:
        return InvalidTopology([f"it cannot be read: {type(exc).__name__}: {exc}"])


class TopologySource(ABC):
    """Holds the topology of all processes. One instance serves one process.

    A source brings documents; its caller decides whether they are used. So a source refuses only
    content that is no document.

    :param options: ``SHARDED_ORM["TOPOLOGY"]["OPTIONS"]``.
    :param setting: the whole of ``SHARDED_ORM``.
    """

    #: Whether :meth:`publish` can work.
    writable: ClassVar[bool] = False
    #: Whether the document can change while the process runs.
    live: ClassVar[bool] = True
    #: Names of the options that the source understands, beside those of all sources.
    option_names: ClassVar[frozenset[str]] = frozenset()
    #: The options among :attr:`option_names` that must be set.
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
        """The file for the last valid document, for a start without the source; None if not set."""
        path = self.options.get("LAST_GOOD")
        return str(path) if path else None

    @property
    def allows_credentials(self) -> bool:
        """Whether documents may hold credentials."""
        return bool(self.options.get("CREDENTIALS", False))

    @abstractmethod
    def describe(self) -> str:
        """The location of the source for people: an address or a path, without credentials."""

    @abstractmethod
    def load(self) -> Document | None:
        """The document that the source holds now; None if none was ever put there.

        Waits for an answer as long as the options allow.

        :raises TopologyUnavailable: the source does not answer.
        :raises InvalidTopology: the source holds no valid document.
        """

    def start(self, on_change: OnChange) -> None:  # noqa: B027  # a source that never changes need not
        """Call ``on_change`` with the present document and each later one. Does not wait.

        If the source is lost, it is looked for in the background until :meth:`stop`. A process
        starts an instance only once; a forked child makes an instance of its own.
        """

    def stop(self) -> None:  # noqa: B027  # as start()
        """End the work of :meth:`start`, and close all connections. May be repeated."""

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        """Replace version ``expected`` by ``document`` in one step.

        Only the document's shape is checked here; see ``operations/topology.py``.

        :param expected: the version that the source holds; 0 for none.
        :raises TopologyConflict: the source holds another version by now.
        :raises TopologyReadOnly: the source cannot be written.
        :raises TopologyUnavailable: the source does not answer; the document may or may not have
            been published.
        """
        raise TopologyReadOnly(f"{self.describe()} cannot be written by this command.")

    def history(self, limit: int) -> list[Revision]:
        """The last ``limit`` revisions, newest first; empty if the source keeps none."""
        return []

    def revision(self, version: int) -> Document:
        """The document of an entry of :meth:`history`.

        :raises LookupError: there is no such entry.
        """
        raise LookupError(f"{self.describe()} keeps no version {version!r}.")

    def using(self, version: int) -> None:  # noqa: B027  # most sources do not record it
        """Record that this process uses ``version`` now. Does not wait."""

    def processes(self) -> list[Process] | None:
        """The processes that are connected; None if the source does not know them."""
        return None


#: Options of every source.
COMMON = frozenset({"LAST_GOOD", "CREDENTIALS"})


def make_source(
    path: str, options: Mapping[str, Any], setting: Mapping[str, Any]
) -> TopologySource:
    """The source that ``TOPOLOGY`` names. Connects to nothing.

    :raises InvalidConfiguration: unknown name or option; lists the choices.
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
