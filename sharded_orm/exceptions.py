"""The errors of the library, as one tree.

::

    ShardedOrmError
    ├── InvalidConfiguration       (ImproperlyConfigured)  the SHARDED_ORM setting is wrong
    ├── RoutingError
    │   ├── ShardKeyRequired       (RuntimeError)          a query does not determine its shards
    │   ├── InvalidShardKey        (ValueError)            a value cannot be a shard key of the group
    │   ├── InexactShardKey        (RuntimeError)          a column treats different keys as equal
    │   ├── UnknownShard           (ConnectionDoesNotExist) the topology has no such shard or group
    │   ├── NoOpenShard            (OperationalError)      no shard of the group takes new keys
    │   ├── NoReachableShard       (OperationalError)      all nodes with open shards are down
    │   ├── ShardKeyChanged        (RuntimeError)          a write would change a row's shard key
    │   ├── CrossShardRelation     (RuntimeError)          a join or relation leaves the shard
    │   │   ├── CrossKeyRelation                           a relation joins rows of two shard keys
    │   │   └── DeletionRefused    (ProtectedError)        rows elsewhere refer to a row to be deleted
    │   ├── UnknownExpression      (NotSupportedError)     an expression may read rows of other shards
    │   ├── InvalidBoundKey        (RuntimeError)          bound() names no shard key, or a wrong value
    │   ├── BoundKeyMismatch       (RuntimeError)          a query or row does not have the bound key
    │   ├── UnplacedKey            (LookupError)           a key has no shard, and must not get one
    │   ├── KeyMoved               (OperationalError)      a key moved while an operation used its old shard
    │   │   ├── KeyFenced                                  the old shard refused a write of a key that moves
    │   │   └── UnknownKeyOfRows                           a table without a model is used while a key moves
    │   ├── DanglingShardKey       (IntegrityError)        a new key refers to no row of the global database
    │   └── UnknownModel           (LookupError)           no sharded model has that name
    ├── ShardMoved                 (OperationalError)      a shard moved to another node during a transaction
    │   └── SideFenced                                     the passive side of a pair refused a write
    ├── ScatterNotSupported        (NotSupportedError)     results of shards cannot be merged exactly
    ├── ScatterError               (OperationalError)      some shards did not answer
    ├── GroupAliasError            (NotSupportedError)     SQL was sent to the alias of a group
    ├── PartialCommitError         (OperationalError)      a group transaction committed in part
    ├── TwoPhaseError
    │   ├── TwoPhaseUnavailable    (NotSupportedError)     the shards cannot commit in two phases
    │   ├── TwoPhaseMisused        (RuntimeError)          a block in two phases is used wrongly
    │   └── CommitOutcomeUnknown   (OperationalError)      a recovery must find out whether all committed
    ├── ShardDatabaseMissing       (OperationalError)      the schema or file of a shard does not exist
    ├── SessionStateRefused        (NotSupportedError)     session state would affect other shards
    ├── PoolTimeout                (OperationalError)      no connection of a node became free in time
    ├── CacheUnavailable           (OperationalError)      a cache server is down, so a write is refused
    ├── OperationError
    │   ├── OperationHeld          (OperationalError)      another process runs the operation
    │   ├── LeaseLost              (OperationalError)      another process has taken the operation over
    │   ├── RehearsalFailed        (OperationalError)      migrations failed in a trial on an empty copy
    │   ├── MoveRefused            (ValueError)            keys or shards cannot be moved as requested
    │   ├── MoveFailed             (OperationalError)      an error has stopped the move of a key
    │   └── BranchesPrepared       (OperationalError)      prepared transactions hold locks on shards
    ├── TopologyError
    │   ├── InvalidTopology        (ValueError)            a topology document cannot be used
    │   ├── TopologyConflict       (OperationalError)      somebody else has published in between
    │   ├── TopologyReadOnly       (NotSupportedError)     commands cannot write to the source
    │   └── TopologyUnavailable    (ImproperlyConfigured)  there is no topology
    ├── InvalidID                  (ValueError)            a number is not an id of the field's layout
    │   └── TimestampExhausted                             the time no longer fits into an id
    ├── PackedIDMismatch           (IntegrityError)        the id of a new row is of another shard or type
    └── TimestampedIDMismatch      (IntegrityError)        a database made an id with another shard's number

Errors that only one part of the library raises are defined in that part: those of ticket servers in
:mod:`sharded_orm.ids.tickets.exceptions`, those of operators' actions in
:mod:`sharded_orm.operations.exceptions`, those of the admin in :mod:`sharded_orm.admin.exceptions`, those
of an app in the module ``exceptions`` of the app.

Each error also inherits from the class in parentheses. So existing code with ``except
OperationalError``, for example, also handles :exc:`ShardMoved`. Mistakes of a program are
``RuntimeError`` and not ``TypeError`` or ``ValueError``, because Django and other packages think
that a query raises these two for bad input of a user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, NotSupportedError, OperationalError
from django.db.models import Model, ProtectedError
from django.utils.connection import ConnectionDoesNotExist


def bullet_list(problems: tuple[str, ...]) -> str:
    """Return ``problems`` as text for the end of a message, each on a line of its own."""
    return "".join(f"\n  - {problem}" for problem in problems)


class ShardedOrmError(Exception):
    """Base class of all errors that the library itself raises."""


class InvalidConfiguration(ShardedOrmError, ImproperlyConfigured):
    """The ``SHARDED_ORM`` setting is wrong. :attr:`problems` lists every problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(
            f"SHARDED_ORM has {count} problem{'s' if count != 1 else ''}:{bullet_list(self.problems)}"
        )


class RoutingError(ShardedOrmError):
    """Base class of routing errors: a query or a row cannot be sent to a shard."""


class ShardKeyRequired(RoutingError, RuntimeError):
    """The query does not say which shards have its rows. To send it to all shards, call
    ``scatter()``.
    """


class InvalidShardKey(RoutingError, ValueError):
    """The value cannot be a shard key of this group, such as a text where the strategy needs a
    number.
    """


class InexactShardKey(RoutingError, RuntimeError):
    """A column's collation treats different shard keys as equal, such as ``Ada`` and ``ada``.

    The query was not sent. The message names the model, the column and the collation, and says how to
    change the column.
    """


class UnknownShard(RoutingError, ConnectionDoesNotExist):
    """The topology has no such shard or group."""


class NoOpenShard(RoutingError, OperationalError):
    """No shard of the group is open for new keys, so a new key cannot be placed."""


class NoReachableShard(RoutingError, OperationalError):
    """All nodes with open shards are down.

    :attr:`causes` has the error of each node, keyed by the node's name.
    """

    def __init__(self, group: str, causes: Mapping[str, BaseException]) -> None:
        self.causes: dict[str, BaseException] = dict(causes)
        shown = "; ".join(f"{node!r}: {cause}" for node, cause in self.causes.items())
        super().__init__(
            f"No new key of group {group!r} can get a shard, because no node with open shards can be"
            f" reached ({shown}). Start one of these servers, or open shards on another node"
            " ('manage.py shards open'). 'manage.py shards status' shows the state of each node."
        )


class ShardKeyChanged(RoutingError, RuntimeError):
    """The write would give a stored row another shard key, and the row might belong on another
    shard then.

    To change the key, move the row explicitly.
    """


class CrossShardRelation(RoutingError, RuntimeError):
    """A query joins rows of different shards, or a row refers to a row on another shard."""


class CrossKeyRelation(CrossShardRelation):
    """A row refers to a row with a different shard key.

    The two rows may be on the same shard, but only by chance.
    """


class DeletionRefused(CrossShardRelation, ProtectedError):
    """Rows in another database refer to the rows to be deleted, and one statement cannot
    delete rows in two databases.

    The admin shows these rows as protected, because this is a ``ProtectedError``.

    :param protected_objects: the rows in the other database. They are stored as a list, because a
        set would merge rows of two shards that have the same id.
    """

    def __init__(self, message: str, protected_objects: Iterable[Model]) -> None:
        rows = {(type(row), row._state.db, row.pk): row for row in protected_objects}
        self.protected_objects = list(rows.values())  # type: ignore[assignment]  # Django's attribute is a set
        RuntimeError.__init__(self, message)


class UnknownExpression(RoutingError, NotSupportedError):
    """An expression in the query may read rows of other shards, for example because it is written
    as SQL.

    The library cannot tell which rows it reads. The message says what to use instead.
    """


class InvalidBoundKey(RoutingError, RuntimeError):
    """The arguments of ``bound()`` name no shard key, or have a value that cannot be a key."""


class BoundKeyMismatch(RoutingError, RuntimeError):
    """The shard key of a query, row or block is not the bound key, which ``bound()`` has set.

    Nothing was sent to a database.
    """


class UnplacedKey(RoutingError, LookupError):
    """The key has no shard yet, and this operation gives it none. Save a row of the key first: this
    places the key on a shard.
    """


class KeyMoved(RoutingError, OperationalError):
    """The key moved to another shard, and the library cannot repeat the operation there.

    It cannot do so inside a transaction, or while rows are streamed. Discard everything that the
    operation has read. If the transaction is run once more, it uses the new shard.

    :attr:`is_in_part` is True if an operation on several shards, outside of transactions, has
    already written to some of them.
    """

    is_in_part = False


class KeyFenced(KeyMoved):
    """A shard has refused a write, because the key of the row is moving away or has moved away.

    The database itself raises the error, so raw SQL gets it as well. The row was not written.
    """


class UnknownKeyOfRows(KeyMoved):
    """A statement for several shards uses a table that no model has, while a shard key is moving.

    During the move, two shards have the rows of the key. To leave out one of the two copies, the
    library needs the model. Without it, rows could be counted twice, so the statement is refused.
    Execute it after the move has ended.
    """


class ShardMoved(ShardedOrmError, OperationalError):
    """A shard moves to another node, and the library cannot repeat the statement there.

    The statement was not executed. Outside of transactions, the library waits for the end of the
    move and repeats the statement, but no longer than ``MOVE_WAIT``. Inside of a transaction, it
    cannot repeat a statement, so run the whole transaction once more.

    :attr:`is_in_part` is True if an operation on several shards, outside of transactions, has
    already written to some of them.
    """

    is_in_part = False


class SideFenced(ShardMoved):
    """The passive side of a pair of servers refused a write.

    The database itself raises the error, so raw SQL gets it as well. The row was not written. The
    other server of the pair is the active side of the shard, or is about to become it.

    :attr:`alias` is the alias of the shard.
    """

    alias = ""


class DanglingShardKey(RoutingError, IntegrityError):
    """A new shard key is a foreign key, and the row that it refers to does not exist.

    The key was not placed on a shard, and nothing was stored.
    """


class UnknownModel(RoutingError, LookupError):
    """The caller has passed a name that no sharded model has, or that several have."""


class ScatterNotSupported(ShardedOrmError, NotSupportedError):
    """The results of the shards cannot be merged into exactly the result that one database would
    return.

    The message names the part of the query at fault, and a remedy.
    """


class ScatterError(ShardedOrmError, OperationalError):
    """Some shards did not answer a query that was sent to several shards.

    :param failures: maps the alias of each shard that did not answer to its error.
    :param asked: the number of shards to which the query was sent.
    :param proven: False if the query itself may be wrong, because no shard could execute it. True
        if the shards are at fault: another shard has answered, or a query cannot cause such errors.
    """

    def __init__(
        self, failures: Mapping[str, BaseException], asked: int, *, proven: bool = True
    ) -> None:
        self.failures = dict(failures)
        shown = ", ".join(
            f"{alias!r} ({type(cause).__name__}: {cause})"
            for alias, cause in list(self.failures.items())[:5]
        )
        more = len(self.failures) - 5
        super().__init__(
            f"{len(self.failures)} of {asked} shards did not answer: {shown}"
            + (f" and {more} more" if more > 0 else "")
            + (
                ". Use .scatter(partial=True) to accept the rows of the others."
                if proven
                else ". No shard could run it, so it may be the query that is wrong, and there is no"
                " partial result: correct the query, or mend the shards ('manage.py migrate_shards')."
            )
        )


class GroupAliasError(ShardedOrmError, NotSupportedError):
    """SQL was sent to the alias that stands for a whole shard group. The alias has no database."""


class PartialCommitError(ShardedOrmError, OperationalError):
    """A transaction on several shards was committed on some of them, and then failed on another.

    :param committed: aliases of the shards on which the transaction was committed.
    :param not_committed: aliases of the shards on which the transaction was rolled back.
    :param cause: the error with which the commit failed.
    """

    def __init__(
        self, committed: Iterable[str], not_committed: Iterable[str], cause: BaseException
    ) -> None:
        self.committed = tuple(committed)
        self.not_committed = tuple(not_committed)
        super().__init__(
            f"The transaction was committed on {list(self.committed)!r}, then failed"
            f" ({type(cause).__name__}: {cause}) and was rolled back on"
            f" {list(self.not_committed)!r}. Shards do not commit atomically:"
            " check the rows of the shards that are named and repeat what is missing."
        )


class TwoPhaseError(ShardedOrmError):
    """Base class of the errors of transactions that are committed in two phases."""


class TwoPhaseUnavailable(TwoPhaseError, NotSupportedError):
    """The shards of the group cannot commit in two phases.

    The message has the reason and the remedy.
    """


class TwoPhaseMisused(TwoPhaseError, RuntimeError):
    """A block with ``two_phase=True`` cannot be used in this way. Nothing was committed."""


class CommitOutcomeUnknown(TwoPhaseError, OperationalError):
    """The connection was lost during the commit that decides whether all shards commit.

    If this commit was executed, all shards commit; otherwise none does. ``manage.py transactions
    recover`` ends the transaction, and so does a later block with ``two_phase=True``. Check the
    rows before you run the transaction once more.

    :param aliases: aliases of the shards of the transaction; the first is the shard on which the
        connection was lost.
    :param cause: the error with which the commit failed.
    """

    def __init__(self, aliases: Iterable[str], cause: BaseException) -> None:
        self.aliases = tuple(aliases)
        super().__init__(
            f"The connection to {self.aliases[0]!r} was lost while it committed"
            f" ({type(cause).__name__}: {cause}). The transaction on {list(self.aliases)!r} is committed"
            " on all of these shards, or on none: 'manage.py transactions recover' ends it. Read the"
            " rows before you repeat it."
        )


class ShardDatabaseMissing(ShardedOrmError, OperationalError):
    """The schema or file of a shard does not exist on the shard's node (database server)."""


class SessionStateRefused(ShardedOrmError, NotSupportedError):
    """The statement sets or reads state of the database session, such as a variable or
    LAST_INSERT_ID().

    Several shards share the session. So a value that is set would also affect other shards, and a
    value that is read may come from another shard.
    """


class PoolTimeout(ShardedOrmError, OperationalError):
    """All connections of a node are in use, and none became free in time."""


class CacheUnavailable(ShardedOrmError, OperationalError):
    """A write was refused, because a cache server is down, and outdated entries would stay in the
    cache.

    If the error was raised at the commit of a transaction, the transaction was rolled back.
    """


class OperationError(ShardedOrmError):
    """Base class of the errors of operators' actions, such as a migration of shards."""


class OperationHeld(OperationError, OperationalError):
    """Another process runs this operation or a conflicting one, or may still run it.

    Also raised if a conflicting operation was interrupted and has not been ended since then.
    """


class LeaseLost(OperationError, OperationalError):
    """Another process has taken over the operation, such as a migration.

    This process must stop at once.
    """


class MoveRefused(OperationError, ValueError):
    """Keys cannot be moved as requested. Nothing was changed. :attr:`problems` lists every reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"The move is refused, and nothing was changed:{bullet_list(self.problems)}"
        )


class MoveFailed(OperationError, OperationalError):
    """An error has stopped the move of a key. The message says where the rows of the key are."""


class BranchesPrepared(OperationError, OperationalError):
    """Two-phase transactions were prepared on shards and have not ended.

    They still lock rows and tables.

    :attr:`problems` names every branch (the part of such a transaction on one shard), and why it
    could not be ended.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "Transactions in two phases are not ended, and hold locks. Nothing was changed. 'manage.py"
            f" transactions recover' ends them when it can:{bullet_list(self.problems)}"
        )


class RehearsalFailed(OperationError, OperationalError):
    """Migrations failed in the rehearsal: a trial on a copy without rows. No shard was changed."""


class TopologyError(ShardedOrmError):
    """Base class of the errors in reading, using or changing the topology of nodes and shards."""


class InvalidTopology(TopologyError, ValueError):
    """A topology document cannot be used. :attr:`problems` lists every problem.

    :param what: the name of the document, with which the message begins.
    """

    def __init__(self, problems: Iterable[str], what: str = "The topology document") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(
            f"{what} has {count} problem{'s' if count != 1 else ''}:{bullet_list(self.problems)}"
        )


class TopologyConflict(TopologyError, OperationalError):
    """Another process has published a topology meanwhile, so this process has not published its own."""


class TopologyReadOnly(TopologyError, NotSupportedError):
    """Commands cannot write to the topology source. The message tells the operator what to do instead."""


class TopologyUnavailable(TopologyError, ImproperlyConfigured):
    """The topology source does not answer or is empty, and no valid topology is saved on this machine."""


class InvalidID(ShardedOrmError, ValueError):
    """A number is not an id of the field's layout, or a part of an id does not fit its bits."""


class TimestampExhausted(InvalidID):
    """The time since the layout's epoch no longer fits into the bits that an id has for it."""


class PackedIDMismatch(ShardedOrmError, IntegrityError):
    """The id of a new row contains the number of a shard or of a table that is not the row's own.

    It does not matter whether the id was given by the caller or generated.
    """


class TimestampedIDMismatch(ShardedOrmError, IntegrityError):
    """The database of a shard made an id that contains the number of another shard.

    The reason is that the schema was copied from that other shard.
    """
