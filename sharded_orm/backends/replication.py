"""Query and change the replication of a server.

A promotion (a replica replaces its primary) and a split (a replica takes over some of the primary's
shards) need this. A promotion first *fences* the primary: it makes the database itself refuse the
writes of all applications.

Each backend whose servers can be promoted derives a class from :class:`ReplicationServer`, and
names the class in its features. :func:`server_class` returns the class for the settings of a node.
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

#: What the operator's account is about to do on a server: fence a primary (make it refuse writes),
#: promote a replica, or end a replication for good. Each of these tasks needs other privileges.
Task = Literal["fence", "promote", "end"]


@dataclass(frozen=True)
class FenceTexts:
    """Texts about the fence of one database product, for messages to operators.

    The fence makes a server refuse writes. MariaDB does so with ``read_only``, PostgreSQL with
    closed databases. The texts use the words of the product.

    In the texts, ``{node}`` is replaced by the name of a node. ``{old}`` and ``{new}`` are replaced
    by the names of the old and the new primary.
    """

    #: ``name`` is the name of the fence in messages. ``is_fenced`` describes a server whose fence
    #: makes it refuse writes.
    name: str
    is_fenced: str
    #: A promotion has phases. ``fences`` says what it does in the phase ``fencing``, for example
    #: "closes the databases of {node}". ``opens`` says what it does in the phase ``unfencing`` or
    #: ``promoting``, for example "lets {node} take writes".
    fences: str
    opens: str
    #: The next five texts are put behind the name of a server, and form a sentence about its fence
    #: with it. For example, ``not_fenced`` is "could not be made read only" on MariaDB.
    not_fenced: str
    stays_open: str
    fenced_before: str
    opened: str
    stays_fenced: str
    #: Why the server could not be fenced in time, such as "sessions do not end there". Part of a
    #: sentence.
    kept_off: str
    #: Who may still write on a fenced server, such as "a privileged account writes there". Part of
    #: a sentence.
    intruder: str
    #: The privileges that an account needs to query the state of the replication.
    to_see: str
    #: The statements that an operator can run by hand. They fence a server (make it refuse writes),
    #: remove the fence, start a stopped replica, or end a replication for good.
    to_fence: str
    to_open: str
    to_start: str
    to_end: str
    #: What the operator has to do after a promotion.
    afterwards: str


@dataclass(frozen=True)
class ReplicationStatus:
    """The state of a server at one moment.

    A *position* is a place in the server's log of changes, such as a GTID set on MariaDB. Only the
    server's :class:`ReplicationServer` class can compare two positions.
    """

    version: str
    #: Identifies the server: no two servers have the same text. The text stays the same when the
    #: server gets another address, so it shows whether two addresses lead to the same server.
    identity: str
    #: Whether the server refuses all writes of applications, as a fenced server and most replicas do.
    read_only: bool
    #: The position (place in the log of changes) of the last change in the server's own log.
    logged: str
    #: The position (place in the log of changes) of the last change that the server has executed.
    #: The change may be a replicated one, or the server's own.
    current: str
    #: Whether this package can promote a server of this kind. For example, False for MySQL and True
    #: for MariaDB.
    can_be_promoted: bool = True
    #: Whether the fence refuses all sessions of applications, even those that only read. If so, a
    #: promotion cannot log in with an application's account to test what the account may do.
    closed: bool = False


@dataclass(frozen=True)
class ReplicationLink:
    """A replication connection by which a server receives the changes of its source, usually the
    primary.
    """

    name: str
    host: str
    port: int
    receives: bool
    executes: bool
    #: The position (place in the log of changes) of the last change that has arrived from the
    #: source. The server may not have executed the change yet.
    received: str
    #: The position of the last change from the source that this server has executed.
    executed: str
    #: Seconds by which the server is behind its source; None if the server does not report them.
    seconds_behind: int | None
    error: str

    @property
    def is_connected(self) -> bool:
        """Whether the server is connected to its source now.

        If it is not, the address of its source may lead to another server by now.
        """
        return True


class ReplicationServer(ABC):
    """A session with the operator's account on one server, to change its replication. For one
    thread only.

    The session does not come from a pool, so the operator never has to wait until the application
    returns a session. As a context manager, this object closes its session at the end of the block.

    :param name: name of the node, for messages.
    :param settings: the node's settings with the operator's account, like an entry of
        ``DATABASES``.
    :param databases: names of the databases whose shards are promoted together. PostgreSQL needs
        them, because its fence closes each database.
    :raises django.db.Error: the server does not answer within 5 seconds, or refuses the account.
    """

    #: The texts for messages to operators.
    texts: ClassVar[FenceTexts]
    #: The name of the database product, for messages. Some servers of the backend may be of another
    #: product, which cannot be promoted, see :attr:`ReplicationStatus.can_be_promoted`.
    product: ClassVar[str]
    default_port: ClassVar[int]
    #: True if a promoted server cannot become a replica again without a new copy of all data. Then
    #: a promotion publishes the new topology first, and promotes the server as its last step,
    #: because this is the only step that cannot be undone.
    is_promoted_for_good: ClassVar[bool] = False
    #: Whether a replica of this kind accepts writes of applications while it replicates. A split
    #: needs such a replica, because the replica takes over the primary's shards one by one.
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

        If the server cannot be promoted, only its version is filled in.
        """

    @abstractmethod
    def links(self) -> Sequence[ReplicationLink]:
        """Return the server's replication connections."""

    @abstractmethod
    def link_from(self, source: Self) -> ReplicationLink | None:
        """Return the replication connection by which this server receives changes from ``source``;
        None if it has none.
        """

    @abstractmethod
    def replicates_from(self, source: Self) -> bool:
        """Whether this server has a replication connection to ``source``."""

    @abstractmethod
    def schemas(self) -> set[str]:
        """Return the names of the schemas that the account may see."""

    @abstractmethod
    def idle_seconds(self) -> float | None:
        """Return for how many seconds the server has had no replicated changes left to execute.

        This is for a promotion whose old primary is dead. It tells the operator the time, because
        changes that the old primary has made since then may be lost. Return None if the server does
        not report the time.
        """

    @abstractmethod
    def prepared_branches(self) -> list[BranchName]:
        """Return all prepared branches on the server that this library has created, in whichever
        project. One query.

        A branch is the part of a two-phase commit on one shard. A prepared branch holds its locks
        until it is committed or rolled back. On MySQL, the account needs the privilege
        XA_RECOVER_ADMIN.
        """

    # ##### Methods that yield reasons against a promotion: sentences without a full stop #####

    @abstractmethod
    def privilege_problems(self, task: Task) -> Iterator[str]:
        """Yield a sentence for each privilege that the operator's account needs for ``task`` and
        does not have. The sentence also says how to grant the privilege.
        """

    @abstractmethod
    def source_problems(self) -> Iterator[str]:
        """Yield the reasons why this primary's changes may not reach its replica, such as a setting
        that leaves some changes out of the log.
        """

    @abstractmethod
    def replica_problems(self, source: Self, link: ReplicationLink) -> Iterator[str]:
        """Yield the reasons why this replica may have other rows than ``source``, although its
        replication from ``source`` works.

        :param link: the replication connection to ``source``.
        """

    @abstractmethod
    def link_problems(self, link: ReplicationLink) -> Iterator[str]:
        """Yield the reasons why the replication ``link`` may not bring all changes to this server,
        for example because a filter leaves some out.
        """

    def warnings(self, task: Task) -> Iterator[str]:
        """Yield facts about this server that the operator should know before ``task``."""
        return iter(())

    @abstractmethod
    def application_problems(self, account: str) -> Iterator[str]:
        """Yield the reasons why a promotion could lose writes of an application's account.

        For example, the account can write although the server is fenced (made to refuse writes), or
        its writes are not replicated. The session of this object must use the application's
        account.

        :param account: how messages call the account, such as ``the application's account
            'photos'``.
        """

    def split_problems(self, source: Self) -> Iterator[str]:
        """Yield the reasons why this replica cannot take part in a split.

        In a split, the replica takes over some of the shards of ``source``, and goes on replicating
        the others.
        """
        return iter(())

    # ##### Changes #####

    @abstractmethod
    def fence(self, patience: float) -> None:
        """Fence the server: make it refuse all writes of applications.

        When this method returns, transactions that began earlier cannot be committed any more.

        :param patience: seconds to wait for running statements or sessions to end.
        :raises django.db.OperationalError: they did not end in time (then :meth:`is_kept_off` is
            true), or the server refuses to be fenced.
        """

    @abstractmethod
    def unfence(self) -> None:
        """Remove the fence, so that the server accepts writes again."""

    @abstractmethod
    def written_since(self, position: str) -> str:
        """Return a description of what was written after ``position`` in the server's log; "" if
        nothing.

        Only the process that has fenced the server may call this, and only while the fence holds.
        """

    def copy_problems(self, source: Self) -> Iterator[str]:
        """Yield the reasons why this server is no replica of ``source``, although it has reached
        the position of ``source`` in the log.

        Call this when ``source`` is fenced (refuses writes), and this server has executed all changes
        of ``source``.
        """
        return iter(())

    @abstractmethod
    def wait_for(self, position: str, seconds: float) -> bool:
        """Wait until this server has executed all replicated changes up to ``position``.

        Return False if that takes more than ``seconds``.
        """

    @abstractmethod
    def wait_for_source(self, source: Self, seconds: float) -> bool:
        """Wait until this server has executed all changes that ``source`` itself has written until
        now.

        Changes that ``source`` has received from other servers do not count. Return False if that
        takes more than ``seconds``.
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
        """Make this replica a primary, but keep it fenced, so that it refuses writes.

        Only for backends with :attr:`is_promoted_for_good`. Can be repeated. Return False if the
        promotion takes more than ``seconds``.
        """
        raise NotImplementedError(f"{self.product} is promoted by stop() and unfence()")

    # ##### Positions and errors #####

    @staticmethod
    @abstractmethod
    def missing(wanted: str, have: str) -> str:
        """Return the part of the position ``wanted`` that a server at the position ``have`` has not
        reached yet. The part is a position, too.

        Return "" if the server has reached ``wanted``.
        """

    @staticmethod
    @abstractmethod
    def has_no_answer(exc: Error) -> bool:
        """Whether ``exc`` means that the server gave no answer, or an incomplete one.

        False if the server has refused the account, or if TLS has failed, because a server has
        answered in these cases.
        """

    @staticmethod
    @abstractmethod
    def is_kept_off(exc: Error) -> bool:
        """Whether :meth:`fence` raised ``exc`` because statements or sessions did not end within
        its ``patience``.
        """

    @staticmethod
    @abstractmethod
    def why_no_session(node: str, account: str, exc: Error) -> str:
        """Return a sentence for the operator that explains why ``account`` could not log in to
        ``node``.

        :param account: how messages call the account, such as ``the OPERATOR account 'root'``.
        :param exc: the error of the attempt.
        """


def can_be_promoted(settings: Mapping[str, Any]) -> bool:
    """Whether this package can promote servers of the backend in ``settings``.

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
