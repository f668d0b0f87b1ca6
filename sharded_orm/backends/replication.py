"""Questions and commands about a server's replication, for promotions and splits.

A server is *fenced* if the database itself refuses the writes of every application, whatever
program sends them.

Each backend whose servers can be promoted derives a class from :class:`ReplicationServer`, and names
it in its features. :func:`server_class` finds the class for the settings of a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from django.db import Error
from django.db.utils import load_backend
from django.utils.module_loading import import_string

from sharded_orm.backends.features import features_of
from sharded_orm.backends.two_phase.branch import BranchName

#: What the operator's account is to do: fence a primary, promote a replica, or end the replication
#: after a split.
Task = Literal["fence", "promote", "end"]


@dataclass(frozen=True)
class FenceTexts:
    """How messages for operators describe the fence of one kind of server.

    ``{node}`` stands for a name of a node; ``{old}`` and ``{new}`` for those of both primaries.
    """

    #: What the fence is called, and what a fenced server is.
    name: str
    is_fenced: str
    #: What a promotion does in the phases ``fencing`` and ``unfencing``, or ``promoting``.
    fences: str
    opens: str
    #: Parts of sentences whose subject is the server: the fence failed, was removed in between, and
    #: so on.
    not_fenced: str
    stays_open: str
    fenced_before: str
    opened: str
    stays_fenced: str
    #: What keeps the fence off for too long.
    kept_off: str
    #: Who writes in spite of the fence.
    intruder: str
    #: Privileges with which an account sees the replication.
    to_see: str
    #: What an operator runs to fence a server by hand, to remove the fence, to let a replica replicate
    #: again, and to end a replication for good.
    to_fence: str
    to_open: str
    to_start: str
    to_end: str
    #: What is left for the operator after a promotion.
    afterwards: str


@dataclass(frozen=True)
class ReplicationStatus:
    """The state of a server at one moment. Positions are texts that only the server's class reads."""

    version: str
    #: Identity of the server. No two servers have the same identity. It does not depend on the
    #: address by which the server is reached.
    identity: str
    #: Whether the server refuses all writes of applications: it is fenced, or a replica that does so.
    read_only: bool
    #: Position of the last change that the server itself has logged.
    logged: str
    #: Position of the last change that the server has executed, its own and replicated ones.
    current: str
    #: Whether this package knows the server's statements.
    can_be_promoted: bool = True
    #: Whether the fence keeps out even those who read, so that no account can be tried.
    closed: bool = False


@dataclass(frozen=True)
class ReplicationLink:
    """A server's replication connection to its source."""

    name: str
    host: str
    port: int
    receives: bool
    executes: bool
    #: Position of the last change that has arrived from the source.
    received: str
    #: Position of the last change from the source that this server has executed.
    executed: str
    #: Seconds by which the server is behind its source; None if it does not tell.
    seconds_behind: int | None
    error: str

    @property
    def is_connected(self) -> bool:
        """Whether it is known to which server the address leads."""
        return True


class ReplicationServer(ABC):
    """A connection to one server with the operator's account. For one thread only.

    The connection is outside of any pool, because its statements are about the whole server and must
    not wait until the application releases a session. As a context manager, it closes the connection
    at the end of the block.

    :param name: name of the node, for messages.
    :param settings: the node's settings with the operator's account, like an entry of ``DATABASES``.
    :param databases: names of the databases with the shards that are promoted together.
        Needed for the fence where a server has several.
    :raises django.db.Error: the server does not answer within 5 seconds, or refuses the account.
    """

    #: The words for operators.
    texts: ClassVar[FenceTexts]
    #: What :attr:`ReplicationStatus.can_be_promoted` means.
    product: ClassVar[str]
    default_port: ClassVar[int]
    #: Whether a promoted server cannot become a replica again without a copy. Such a server is
    #: promoted after the topology was published, so that everything before can be undone.
    is_promoted_for_good: ClassVar[bool] = False
    #: Whether a replica of this kind can take writes while it replicates, so that shards can go over
    #: to it one by one.
    replica_takes_writes: ClassVar[bool] = True

    name: str
    #: An object of Django's own backend for this kind of server.
    _connection: Any

    @abstractmethod
    def __init__(
        self, name: str, settings: Mapping[str, Any], databases: Sequence[str] = ()
    ) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def _rows(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def _value(self, sql: str, *parameters: Any) -> Any:
        (row,) = self._rows(sql, *parameters)
        (value,) = row.values()
        return value

    # ##### Questions about the state of the server #####

    @abstractmethod
    def status(self) -> ReplicationStatus:
        """Return the state of the server. One or two round trips.

        If the server cannot be promoted, only the version is filled in.
        """

    @abstractmethod
    def links(self) -> Sequence[ReplicationLink]:
        """Return the server's replication connections."""

    @abstractmethod
    def link_from(self, source: Self) -> ReplicationLink | None:
        """Return the replication connection by which this server receives from ``source``."""

    @abstractmethod
    def replicates_from(self, source: Self) -> bool:
        """Whether the server has a replication connection to the server of ``source``."""

    @abstractmethod
    def schemas(self) -> set[str]:
        """Return the names of the schemas that the account may see."""

    @abstractmethod
    def idle_seconds(self) -> float | None:
        """Return for how many seconds replication has had nothing to execute.

        Return None if the server does not tell.
        """

    @abstractmethod
    def prepared_branches(self) -> list[BranchName]:
        """Return the prepared branches of this library, of all sites. One query.

        On MySQL, the account needs the privilege XA_RECOVER_ADMIN.
        """

    # ##### Reasons against a promotion, as sentences without a full stop #####

    @abstractmethod
    def privilege_problems(self, task: Task) -> Iterator[str]:
        """Yield which privileges for ``task`` the operator's account lacks, and how to grant them."""

    @abstractmethod
    def source_problems(self) -> Iterator[str]:
        """Yield why changes of this primary may not reach its replica."""

    @abstractmethod
    def replica_problems(self, source: Self, link: ReplicationLink) -> Iterator[str]:
        """Yield why this replica differs from ``source``, though it replicates."""

    @abstractmethod
    def link_problems(self, link: ReplicationLink) -> Iterator[str]:
        """Yield why ``link`` may not bring everything to this server."""

    def warnings(self, task: Task) -> Iterator[str]:
        """Yield what the operator should know about this server before ``task``."""
        return iter(())

    @abstractmethod
    def application_problems(self, account: str) -> Iterator[str]:
        """Yield why writes of the account of this session could be lost.

        The fence may not stop the account, or the account may write what is not replicated.

        :param account: words for the account, such as ``the application's account 'photos'``.
        """

    def split_problems(self, source: Self) -> Iterator[str]:
        """Yield why this server cannot take shards over from ``source`` while it replicates."""
        return iter(())

    # ##### Changes #####

    @abstractmethod
    def fence(self, patience: float) -> None:
        """Make the server refuse all writes of applications.

        When this method returns, no transaction of before can be committed any more.

        :param patience: seconds to wait for what is under way.
        :raises django.db.OperationalError: this took longer (:meth:`is_kept_off`), or the server
            refuses it.
        """

    @abstractmethod
    def unfence(self) -> None:
        """Remove the fence."""

    @abstractmethod
    def written_since(self, position: str) -> str:
        """Return what was written after the server had logged ``position``; "" if nothing.

        To be called on a fenced server, by the process that has fenced it.
        """

    def copy_problems(self, source: Self) -> Iterator[str]:
        """Yield why this replica is none of the fenced ``source``, though it has reached its position."""
        return iter(())

    @abstractmethod
    def wait_for(self, position: str, seconds: float) -> bool:
        """Wait until replication has executed ``position``. Return False if that takes more than
        ``seconds``.
        """

    @abstractmethod
    def wait_for_source(self, source: Self, seconds: float) -> bool:
        """Wait until replication has executed all that ``source`` itself has written by now.

        Return False if that takes more than ``seconds``.
        """

    @abstractmethod
    def start(self, link: str) -> None:
        """Start the replication connection named ``link``. Does nothing if it runs already."""

    @abstractmethod
    def stop(self, link: str) -> None:
        """Stop the replication connection named ``link``. Does nothing if it is stopped already."""

    @abstractmethod
    def forget(self, link: str) -> None:
        """Remove the stopped replication connection named ``link``."""

    def promote(self, seconds: float) -> bool:
        """Make a replica that is promoted for good a primary. It stays fenced. Can be repeated.

        Return False if that takes more than ``seconds``.
        """
        raise NotImplementedError(f"{self.product} is promoted by stop() and unfence()")

    # ##### Positions and errors #####

    @staticmethod
    @abstractmethod
    def missing(wanted: str, have: str) -> str:
        """Return the part of the position ``wanted`` that lies beyond the position ``have``.

        The result is "" if nothing does.
        """

    @staticmethod
    @abstractmethod
    def has_no_answer(exc: Error) -> bool:
        """Whether ``exc`` means that the server gave no answer, or an incomplete one.

        False if the server refused the account or if TLS failed: in both cases the server has
        answered.
        """

    @staticmethod
    @abstractmethod
    def is_kept_off(exc: Error) -> bool:
        """Whether ``exc`` means that :meth:`fence` gave up waiting."""

    @staticmethod
    @abstractmethod
    def why_no_session(node: str, account: str, exc: Error) -> str:
        """Return a sentence that explains why ``account`` could not open a session on ``node``.

        :param account: words for the account, such as ``the OPERATOR account 'root'``.
        """


def can_be_promoted(settings: Mapping[str, Any]) -> bool:
    """Whether servers of the backend in ``settings`` can be promoted.

    :param settings: an entry of ``DATABASES`` or ``NODES``.
    """
    return bool(_path(settings))


def server_class(settings: Mapping[str, Any]) -> type[ReplicationServer]:
    """Return the class for the servers of the backend in ``settings``, which can be promoted."""
    found: type[ReplicationServer] = import_string(_path(settings))
    return found


def _path(settings: Mapping[str, Any]) -> str:
    return features_of(load_backend(settings["ENGINE"]).DatabaseWrapper).replication_server
