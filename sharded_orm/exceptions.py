"""All errors of the library, as one tree.

::

    ShardedOrmError
    ├── InvalidConfiguration       (ImproperlyConfigured)  the SHARDED_ORM setting; lists all that is wrong
    ├── RoutingError
    │   ├── ShardKeyRequired       (TypeError)             a query names no shard
    │   ├── InvalidShardKey        (ValueError)            a key that no strategy can place
    │   ├── InexactShardKey        (ImproperlyConfigured)  a column that takes two keys for one
    │   ├── UnknownShard           (ConnectionDoesNotExist) no such shard or group in the topology
    │   ├── NoOpenShard            (OperationalError)      no shard takes new keys
    │   ├── ShardKeyChanged        (ValueError)            a write would move a row to another key
    │   ├── CrossShardRelation     (ValueError)            a join or relation that leaves the shard
    │   ├── UnknownExpression      (NotSupportedError)     SQL that may read any row
    │   ├── UnplacedKey            (LookupError)           a shard is needed and the key has none
    │   └── UnknownModel           (LookupError)           no sharded model has that name
    ├── ScatterNotSupported        (NotSupportedError)     this query cannot be merged exactly
    ├── ScatterError               (OperationalError)      shards that did not answer
    ├── GroupAliasError            (NotSupportedError)     SQL on the alias that stands for a group
    ├── PartialCommitError         (OperationalError)      a group transaction that committed in part
    ├── ShardDatabaseMissing       (OperationalError)      a shard whose schema or file does not exist
    ├── SessionStateRefused        (NotSupportedError)     session state that cannot be kept apart
    ├── PoolTimeout                (OperationalError)      no connection of a node became free in time
    ├── TicketError
    │   ├── UnknownSequence        (LookupError)           no server has the sequence
    │   ├── InvalidSequence        (ValueError)            a sequence that cannot be created or moved
    │   ├── SequenceNotChecked     (OperationalError)      it is unknown which ids exist
    │   ├── InvalidTicketCount     (ValueError)            not 1 to 1,000,000 ids
    │   ├── SequenceExhausted                              no number is left below 2**63
    │   ├── TicketServerMisconfigured (ImproperlyConfigured) not the server that TICKETS describes
    │   ├── TicketServerBehind     (OperationalError)      it would repeat ids, as after a restore
    │   └── TicketServersUnavailable (OperationalError)    no ticket server answers
    ├── CacheUnavailable           (OperationalError)      a write that cannot be announced
    ├── AdminError
    │   ├── InvalidFocus           (LookupError)           no such shard or key
    │   ├── InvalidObjectID        (LookupError)           a link that leads to no row
    │   └── TooManyMisplaced       (OperationalError)      rows on a wrong shard, too many to leave alone
    ├── OperationError
    │   ├── InvalidSelection       (LookupError)           the selected shards do not exist
    │   ├── InvalidShardCommand    (ValueError)            a command that cannot be run on shards
    │   ├── InvalidWaves           (ValueError)            a number of workers, shards or seconds out of range
    │   ├── JournalMissing         (ImproperlyConfigured)  the global database has no journal
    │   ├── NothingUnclear         (LookupError)           a shard that waits for no answer
    │   ├── OperationHeld          (OperationalError)      somebody else runs it
    │   ├── LeaseLost              (OperationalError)      somebody else has taken it over
    │   ├── OperationStopped                               it was asked to stop, and can go on later
    │   ├── OperationUnclear                               it is unknown whether something took effect
    │   ├── InvalidMigrationTarget (LookupError)           no such app, migration or plan
    │   ├── RehearsalFailed        (OperationalError)      migrations that failed before a shard was touched
    │   ├── SchemaDiffers          (OperationalError)      a shard whose tables differ from its migrations
    │   ├── PromotionRefused       (OperationalError)      a primary cannot be replaced; lists all reasons
    │   ├── PromotionFailed        (OperationalError)      a promotion stopped by an error
    │   └── GrowthRefused          (ValueError)            a group cannot grow in that way
    ├── TopologyError
    │   ├── InvalidTopology        (ValueError)            a document that cannot be used; lists all that is wrong
    │   ├── TopologyConflict       (OperationalError)      somebody else has published in between
    │   ├── TopologyReadOnly       (NotSupportedError)     a source that commands cannot write
    │   └── TopologyUnavailable    (ImproperlyConfigured)  there is no topology
    ├── InvalidID                  (ValueError)            no id of the layout
    │   └── TimestampExhausted                             the time does not fit any more
    └── PackedIDMismatch           (IntegrityError)        a table generated another shard's id

Each error also inherits the class in parentheses, which callers of Django catch already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, NotSupportedError, OperationalError
from django.utils.connection import ConnectionDoesNotExist


class ShardedOrmError(Exception):
    """Base of every error that the library itself raises."""


class InvalidConfiguration(ShardedOrmError, ImproperlyConfigured):
    """The ``SHARDED_ORM`` setting is wrong; :attr:`problems` lists everything that is wrong with it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"SHARDED_ORM has {count} problem{'s' if count != 1 else ''}:{lines}")


class RoutingError(ShardedOrmError):
    """A query or a row could not be sent to a shard."""


class ShardKeyRequired(RoutingError, TypeError):
    """The query does not determine its shards, so it would have to ask all of them."""


class InvalidShardKey(RoutingError, ValueError):
    """The value cannot be a shard key of this group."""


class InexactShardKey(RoutingError, ImproperlyConfigured):
    """A database takes keys for equal that the router distinguishes, such as ``Ada`` and ``ada``.

    Nothing was sent. The message names model, column and collation, and how to change it.
    """


class UnknownShard(RoutingError, ConnectionDoesNotExist):
    """The topology has no such shard or group."""


class NoOpenShard(RoutingError, OperationalError):
    """No shard of the group is open for new keys."""


class ShardKeyChanged(RoutingError, ValueError):
    """The write would change a row's shard key, which only an explicit move may do."""


class CrossShardRelation(RoutingError, ValueError):
    """The query joins, or the instance refers to, rows that are not on the same shard."""


class UnknownExpression(RoutingError, NotSupportedError):
    """An expression might read rows of other shards; the library cannot tell whether it does."""


class UnplacedKey(RoutingError, LookupError):
    """The key has no shard yet and the operation must not give it one."""


class UnknownModel(RoutingError, LookupError):
    """There is no such sharded model, or several have that name."""


class ScatterNotSupported(ShardedOrmError, NotSupportedError):
    """The results of several shards cannot be merged into the exact result of one database."""


class ScatterError(ShardedOrmError, OperationalError):
    """Some shards did not answer; :attr:`failures` maps each shard's alias to its cause.

    :param asked: the number of shards that were asked.
    :param proven: whether the query is certainly not the cause: the errors concern the shards
        alone, or another shard has answered the same query.
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
    """SQL was sent to the alias of a shard group, which has no database of its own."""


class PartialCommitError(ShardedOrmError, OperationalError):
    """A group transaction committed on some shards and failed on the next one."""

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


class ShardDatabaseMissing(ShardedOrmError, OperationalError):
    """The schema or file of a shard does not exist on its node."""


class SessionStateRefused(ShardedOrmError, NotSupportedError):
    """The statement sets session state that cannot be kept apart from other shards."""


class PoolTimeout(ShardedOrmError, OperationalError):
    """All connections of a node are in use, and none became free in time."""


class TicketError(ShardedOrmError):
    """An id could not be handed out."""


class UnknownSequence(TicketError, LookupError):
    """No ticket server has a sequence of that name."""


class InvalidSequence(TicketError, ValueError):
    """A sequence cannot be created or moved with that name, start or form."""


class SequenceNotChecked(TicketError, OperationalError):
    """It is unknown which ids exist or have been handed out: a server or a shard is down."""


class InvalidTicketCount(TicketError, ValueError):
    """That number of ids cannot be requested."""


class SequenceExhausted(TicketError):
    """The numbers of a sequence below 2**63 are used up."""


class TicketServerMisconfigured(TicketError, ImproperlyConfigured):
    """A server is not the one that ``TICKETS`` describes: other servers may give the same ids."""


class TicketServerBehind(TicketError, OperationalError):
    """A server would repeat ids that it has handed out before, as after a restore from a backup."""


class TicketServersUnavailable(TicketError, OperationalError):
    """No ticket server answered; :attr:`causes` maps each alias to its error."""

    def __init__(self, sequence: str, causes: Mapping[str, BaseException]) -> None:
        self.causes: dict[str, BaseException] = dict(causes)
        shown = "; ".join(f"{alias!r}: {cause}" for alias, cause in self.causes.items())
        super().__init__(
            f"No ticket server could hand out an id of sequence {sequence!r} ({shown})."
            " 'manage.py tickets status' shows the state of each."
        )


class CacheUnavailable(ShardedOrmError, OperationalError):
    """A cache server is down, so entries could not be invalidated; the write was not committed."""


class AdminError(ShardedOrmError):
    """The admin cannot show what its URL names; the message is for its user."""


class InvalidFocus(AdminError, LookupError):
    """A shard or a value of the shard key that does not or cannot exist.

    The message does not reveal the shard of a key. :attr:`home` is the alias of that shard, if the
    key has one, for users who may look there.
    """

    def __init__(self, message: str, *, home: str | None = None) -> None:
        self.home = home
        super().__init__(message)


class InvalidObjectID(AdminError, LookupError):
    """The part of a URL that names a row is malformed, or leads to no shard."""


class TooManyMisplaced(AdminError, OperationalError):
    """An action on all rows of a shard did nothing: too many rows belong on other shards."""


class OperationError(ShardedOrmError):
    """A long operation cannot begin or go on."""


class InvalidSelection(OperationError, LookupError):
    """The selected shards, group or node do not exist, or the selection is empty."""


class InvalidShardCommand(OperationError, ValueError):
    """The management command does not exist, or has no option for the database to work on."""


class InvalidWaves(OperationError, ValueError):
    """Work on shards cannot be divided into waves with these numbers."""


class JournalMissing(OperationError, ImproperlyConfigured):
    """The global database has no tables for the journal, or none that can be written now."""


class NothingUnclear(OperationError, LookupError):
    """An interrupted operation was answered for, but it does not wait for an answer."""


class OperationHeld(OperationError, OperationalError):
    """The operation runs already, or was interrupted so recently that it may still run."""


class LeaseLost(OperationError, OperationalError):
    """Another process has taken the operation over; this process must stop at once."""


class PromotionRefused(OperationError, OperationalError):
    """A primary cannot be replaced by its replica; :attr:`problems` lists all reasons."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"The promotion is refused:{lines}")


class PromotionFailed(OperationError, OperationalError):
    """A promotion was stopped by an error.

    :attr:`settled` is False if servers were left in an intermediate state.
    """

    def __init__(self, message: str, *, settled: bool = True) -> None:
        self.settled = settled
        super().__init__(message)


class GrowthRefused(OperationError, ValueError):
    """A group cannot add, open or close shards in that way."""


class OperationStopped(OperationError):
    """The work on a shard was asked to stop, and stopped cleanly; it can go on later."""


class OperationUnclear(OperationError):
    """It is unknown whether an interrupted operation took effect; the message says what to check."""


class InvalidMigrationTarget(OperationError, LookupError):
    """The app or migration does not exist, or no plan leads to the state."""


class RehearsalFailed(OperationError, OperationalError):
    """Migrations failed on an empty copy; no shard was changed."""


class SchemaDiffers(OperationError, OperationalError):
    """After its migrations a shard does not have the expected schema; lists the differences."""


class TopologyError(ShardedOrmError):
    """The topology cannot be read, used or changed."""


class InvalidTopology(TopologyError, ValueError):
    """A topology document cannot be used; :attr:`problems` lists everything that is wrong."""

    def __init__(self, problems: Iterable[str], what: str = "The topology document") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{what} has {count} problem{'s' if count != 1 else ''}:{lines}")


class TopologyConflict(TopologyError, OperationalError):
    """Somebody else has changed the topology meanwhile; nothing was published."""


class TopologyReadOnly(TopologyError, NotSupportedError):
    """Commands cannot write to the source of the topology; the message says what to do."""


class TopologyUnavailable(TopologyError, ImproperlyConfigured):
    """The source of the topology does not answer or is empty, and there is no last good copy."""


class InvalidID(ShardedOrmError, ValueError):
    """A number is no id of the layout, or a part does not fit into its bits."""


class TimestampExhausted(InvalidID):
    """The time since the epoch no longer fits into the bits that an id has for it."""


class PackedIDMismatch(ShardedOrmError, IntegrityError):
    """The table of a shard generated an id of another shard or type."""
