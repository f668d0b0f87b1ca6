"""The contract of a topology source: where the document comes from and goes to.

Sources are pluggable: ``SHARDED_ORM["TOPOLOGY"]["SOURCE"]`` names one of the built-in ones
or the dotted path of a subclass of :class:`TopologySource`.
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

#: Called with each document that arrives, or with the error of one that cannot be read. From
#: any thread; quick; never raises.
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
    #: Whether it is the one that asks.
    own: bool = False


def arrived(read: Callable[[], Document | None]) -> Document | TopologyError | None:
    """What ``read`` gives, or the error for :data:`OnChange`; raises nothing.

    So that a source goes on following, whatever it was given to read.
    """
    try:
        return read()
    except TopologyError as exc:
        return exc
    except Exception as exc:
        return InvalidTopology([f"it cannot be read: {type(exc).__name__}: {exc}"])


class TopologySource(ABC):
    """Where the topology of all processes is kept. One instance serves one process.

    A source brings documents; whether they are used is decided by who asks it. So it
    refuses what is no document at all, and nothing else.

    :param options: ``SHARDED_ORM["TOPOLOGY"]["OPTIONS"]``.
    :param setting: the whole of ``SHARDED_ORM``.
    """

    #: Whether :meth:`publish` can work.
    writable: ClassVar[bool] = False
    #: Whether the document can change while the process runs.
    live: ClassVar[bool] = True
    #: Names of the options that the source understands, beside those of all sources.
    option_names: ClassVar[frozenset[str]] = frozenset()
    #: Of these, the ones it cannot do without.
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
        """The file with the last document that was in order, for a start without the source."""
        path = self.options.get("LAST_GOOD")
        return str(path) if path else None

    @property
    def allows_credentials(self) -> bool:
        return bool(self.options.get("CREDENTIALS", False))

    @abstractmethod
    def describe(self) -> str:
        """Where it is, for people: an address or a path, no credentials."""

    @abstractmethod
    def load(self) -> Document | None:
        """What the source holds now; None while nothing was ever put there.

        Waits for an answer within the time that the options allow.

        :raises TopologyUnavailable: it does not answer.
        :raises InvalidTopology: it holds what is no document.
        """

    def start(self, on_change: OnChange) -> None:  # noqa: B027  # a source that never changes need not
        """Tell of every change from now on, and of what is there now. Does not wait for it.

        A source that is lost is looked for until :meth:`stop`, in the background. The process
        must not have started it before; a forked child makes an instance of its own.
        """

    def stop(self) -> None:  # noqa: B027  # as start()
        """End what :meth:`start` began, connections included. Repeatable."""

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        """Put ``document`` in the place of version ``expected`` (0: of nothing), as one step.

        Nothing but its shape is checked here; see ``operations/topology.py``.

        :raises TopologyConflict: the source holds another version by now.
        :raises TopologyReadOnly: the source cannot be written.
        :raises TopologyUnavailable: it does not answer; the document may or may not be there.
        """
        raise TopologyReadOnly(f"{self.describe()} cannot be written by this command.")

    def history(self, limit: int) -> list[Revision]:
        """The last ``limit`` revisions, newest first; empty where none are kept."""
        return []

    def revision(self, version: int) -> Document:
        """The document of an entry of :meth:`history`.

        :raises LookupError: there is none.
        """
        raise LookupError(f"{self.describe()} keeps no version {version!r}.")

    def using(self, version: int) -> None:  # noqa: B027  # nobody asks, with most sources
        """This process uses ``version`` now. Does not wait."""

    def processes(self) -> list[Process] | None:
        """The processes that are connected; None where the source does not know them."""
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
