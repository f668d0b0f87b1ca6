"""Query and change the replication of a server, for promotions (a replica replaces its primary) and
splits (a replica takes over some of the shards).

A server is *fenced* if the database itself refuses the writes of all applications.

Each backend whose servers can be promoted derives a class from :class:`ReplicationServer`, and names it
in its features. :func:`server_class` returns the class for the settings of a node.
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

#: The tasks of the operator's account: fence a primary (make it refuse writes), promote a replica, or
#: end a replication for good.
Task = Literal["fence", "promote", "end"]


@dataclass(frozen=True)
class FenceTexts:
    """Texts for messages to operators that describe the fence of one kind of server. The fence
    makes a server refuse writes.

    In the texts, ``{node}`` is replaced by the name of a node; ``{old}`` and ``{new}`` are replaced by
    the names of the old and the new primary.
    """

    #: The name of the fence, which makes a server refuse writes, and a description of a fenced server.
    name: str
    is_fenced: str
    #: ``fences`` says what a promotion does in its phase ``fencing``, for example "closes the
    #: databases of {node}". ``opens`` says what it does in its phase ``unfencing`` or
    #: ``promoting``.
    fences: str
    opens: str
    #: Five predicates for messages. Each completes a sentence whose subject is the server: it could
    #: not be fenced (made to refuse writes), stays open, was fenced before, was opened meanwhile, or
    #: stays fenced.
    not_fenced: str
    stays_open: str
    fenced_before: str
    opened: str
    stays_fenced: str
    #: A part of a sentence that says what can delay the fencing of a server for too long, such as
    #: "sessions do not end there".
    kept_off: str
    #: Which account or process may write although the server is fenced (made to refuse writes). A
    #: part of a sentence.
    intruder: str
    #: Privileges that an account needs to see the replication.
    to_see: str
    #: Statements for an operator: to fence a server (make it refuse writes), to remove the fence,
    #: to start a replica again, and to end a replication for good.
    to_fence: str
    to_open: str
    to_start: str
    to_end: str
    #: What the operator has to do after a promotion.
    afterwards: str


@dataclass(frozen=True)
class ReplicationStatus:
    """The state of a server at one moment.

    A position is a place in the log of changes, as a text that only the server's class can read.
    """

    version: str
    #: A text that identifies the server. No two servers have the same text. It does not depend on
    #: the server's address.
    identity: str
    #: Whether the server refuses all writes of applications, as a fenced server and most replicas do.
    read_only: bool
    #: Position of the last change in the server's own log.
    logged: str
    #: Position of the last change that the server has executed, whether its own or a replicated one.
    current: str
    #: Whether this package has the SQL statements to promote a server of this kind.
    can_be_promoted: bool = True
    #: Whether the fence, which makes the server refuse writes, refuses even sessions that only read.
    #: No account can be tested then.
    closed: bool = False


@dataclass(frozen=True)
class ReplicationLink:
    """A replication connection by which a server receives changes from its source."""

    name: str
    host: str
    port: int
    receives: bool
    executes: bool
    #: Position of the last change that has arrived from the source.
    received: str
    #: Position of the last change from the source that this server has executed.
    executed: str
    #: Seconds by which the server is behind its source; None if the server does not report them.
    seconds_behind: int | None
    error: str

    @property
    def is_connected(self) -> bool:
        """Whether the server is connected to its source. Only then is it certain which server is at
        the source's address.
        """
        return True


class ReplicationServer(ABC):
    """A connection to one server with the operator's account. For one thread only.

    The connection is outside of any pool. Its statements are about the whole server, and must not
    wait until the application releases a session. As a context manager, it closes the connection at
    the end of the block.

    :param name: name of the node, for messages.
    :param settings: the node's settings with the operator's account, like an entry of
        ``DATABASES``.
    :param databases: names of the databases whose shards are promoted together. Needed for the
        fence if a server can have several databases.
    :raises django.db.Error: the server does not answer within 5 seconds, or refuses the account.
    """

    #: The texts for messages to operators.
    texts: ClassVar[FenceTexts]
    #: Name of the database product whose servers can be promoted. The backend may also know a
    #: product whose servers cannot, see :attr:`ReplicationStatus.can_be_promoted`.
    product: ClassVar[str]
    default_port: ClassVar[int]
    #: Whether a promoted server can become a replica again only as a new copy of all data. If so,
    #: it is promoted last, after the new topology was published, because all earlier steps can be
    #: undone.
    is_promoted_for_good: ClassVar[bool] = False
    #: Whether a replica of this kind accepts writes while it replicates. Only then can it take over
    #: the primary's shards one by one.
    replica_takes_writes: ClassVar[bool] = True

    name: str
    #: A connection object of Django's own backend for this kind of server.
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

    # ##### Queries about the state of the server #####

    @abstractmethod
    def status(self) -> ReplicationStatus:
        """Return the state of the server. One or two round trips.

        If the server cannot be promoted, only its version is known.
        """

    @abstractmethod
    def links(self) -> Sequence[ReplicationLink]:
        """Return the server's replication connections."""

    @abstractmethod
    def link_from(self, source: Self) -> ReplicationLink | None:
        """Return the replication connection by which this server receives from ``source``; None if it
        has none.
        """

    @abstractmethod
    def replicates_from(self, source: Self) -> bool:
        """Whether the server has a replication connection to the server of ``source``."""

    @abstractmethod
    def schemas(self) -> set[str]:
        """Return the names of the schemas that the account may see."""

    @abstractmethod
    def idle_seconds(self) -> float | None:
        """Return for how many seconds the server has had no replicated change left to execute.

        Return None if the server does not report it.
        """

    @abstractmethod
    def prepared_branches(self) -> list[BranchName]:
        """Return the prepared branches of this library, from all projects. One query.

        A branch is the part of a two-phase transaction on one shard. On MySQL, the account needs the
        privilege XA_RECOVER_ADMIN.
        """

    # ##### Reasons against a promotion: sentences without a full stop #####

    @abstractmethod
    def privilege_problems(self, task: Task) -> Iterator[str]:
        """Yield the reasons why the operator's account cannot do ``task``: missing privileges, and how
        to grant them.
        """

    @abstractmethod
    def source_problems(self) -> Iterator[str]:
        """Yield the reasons why changes of this primary may not reach its replica."""

    @abstractmethod
    def replica_problems(self, source: Self, link: ReplicationLink) -> Iterator[str]:
        """Yield the reasons why this replica may differ from ``source``, although it replicates."""

    @abstractmethod
    def link_problems(self, link: ReplicationLink) -> Iterator[str]:
        """Yield the reasons why the replication ``link`` may not bring all changes to this server."""

    def warnings(self, task: Task) -> Iterator[str]:
        """Yield facts about this server that the operator should know before ``task``."""
        return iter(())

    @abstractmethod
    def application_problems(self, account: str) -> Iterator[str]:
        """Yield the reasons why writes of an application's account could be lost. This object must
        be connected with that account.

        For example, the account can write although the server is fenced (made to refuse writes), or
        its writes are not replicated.

        :param account: words for the account, such as ``the application's account 'photos'``.
        """

    def split_problems(self, source: Self) -> Iterator[str]:
        """Yield the reasons why this server cannot take over single shards from ``source`` and go on
        replicating the other shards from ``source``.
        """
        return iter(())

    # ##### Changes #####

    @abstractmethod
    def fence(self, patience: float) -> None:
        """Make the server refuse all writes of applications.

        When this method returns, no earlier transaction can be committed any more.

        :param patience: seconds to wait for running statements or sessions to end.
        :raises django.db.OperationalError: the wait took longer (:meth:`is_kept_off`), or the server
            refuses the fence.
        """

    @abstractmethod
    def unfence(self) -> None:
        """Remove the fence, so that the server accepts writes again."""

    @abstractmethod
    def written_since(self, position: str) -> str:
        """Return a description of what was written after the server had logged ``position``; "" if
        nothing. Must be called by the process that has fenced the server, while the fence holds.
        """

    def copy_problems(self, source: Self) -> Iterator[str]:
        """Yield the reasons why this server is no replica of ``source``.

        Called when this server has reached the position of ``source`` in the log, and ``source`` is
        fenced (refuses writes).
        """
        return iter(())

    @abstractmethod
    def wait_for(self, position: str, seconds: float) -> bool:
        """Wait until replication has executed all changes up to ``position``.

        Return False if that takes more than ``seconds``.
        """

    @abstractmethod
    def wait_for_source(self, source: Self, seconds: float) -> bool:
        """Wait until replication has executed all changes that ``source`` itself has written until now.

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
        """Make this replica a primary that stays fenced (refuses writes), on backends with
        :attr:`is_promoted_for_good`.

        Can be repeated. Return False if that takes more than ``seconds``.
        """
        raise NotImplementedError(f"{self.product} is promoted by stop() and unfence()")

    # ##### Positions and errors #####

    @staticmethod
    @abstractmethod
    def missing(wanted: str, have: str) -> str:
        """Return the part of ``wanted``, a position in the log of changes, that lies beyond the
        position ``have``.

        Return "" if no part lies beyond it.
        """

    @staticmethod
    @abstractmethod
    def has_no_answer(exc: Error) -> bool:
        """Whether ``exc`` means that the server gave no answer, or an incomplete one.

        False if the server refused the account, or if TLS failed, because the server has answered then.
        """

    @staticmethod
    @abstractmethod
    def is_kept_off(exc: Error) -> bool:
        """Whether ``exc`` means that :meth:`fence` stopped waiting after its ``patience``."""

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
    """Return the subclass of :class:`ReplicationServer` for the backend in ``settings``.

    :param settings: an entry of ``DATABASES`` or ``NODES`` whose servers can be promoted.
    """
    found: type[ReplicationServer] = import_string(_path(settings))
    return found


def _path(settings: Mapping[str, Any]) -> str:
    return features_of(load_backend(settings["ENGINE"]).DatabaseWrapper).replication_server
