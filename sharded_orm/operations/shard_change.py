"""Change the node on which a shard takes writes.

There are two such changes: a shard moves to another node, or the other side of a pair becomes
active. Both are committed at the moment when the new topology is published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused, TopologyConflict, TopologyError, TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard
from sharded_orm.topology.range_entries import entry_of, primary_of

#: After a change, an operation waits until every process uses the new topology. It waits for this
#: number of seconds at most.
FOLLOWERS_PATIENCE: Final = 10.0
#: If the source of the topology does not answer whether a change is published, the query is
#: repeated for this number of seconds at most.
SOURCE_PATIENCE: Final = 15.0
# The number of seconds between two such queries.
_INTERVAL: Final = 0.5


@dataclass(frozen=True)
class ShardChange:
    """The change of the node on which one shard takes writes, from ``source`` to ``target``."""

    group: str
    number: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"shard {self.number} of group {self.group!r}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)

    def on(self, node: str) -> Shard:
        """Return a ``Shard`` object to connect to the shard's schema on ``node``.

        This is possible even if the topology places the shard on a different node.
        """
        return replace(runtime.shard(self.group, self.number), node=node)

    def is_published(self, document: Document) -> bool:
        """Return whether the topology in ``document`` has the change already."""
        entry = entry_of(document.content(), self.group, self.number)
        return entry is not None and primary_of(entry) == self.target

    def publish_in(self, document: Document) -> Document:
        """Return a copy of ``document`` in which the shard takes writes on ``target``.

        If it does so in ``document`` already, return ``document`` itself.
        """
        raise NotImplementedError


C = TypeVar("C", bound=ShardChange)


class ShardChangeRecord(Generic[C]):
    """Records in the journal how far the change of one shard has come, and publishes the change.

    The record is in the arguments of the operation's run. If another process takes over the run,
    this process can record and publish nothing more.

    :param run: the run, which this process holds.
    """

    #: A phrase for this kind of change in the history of the topology, such as "the move".
    noun: ClassVar[str]

    def __init__(self, run: JournalRun, change: C) -> None:
        self._run = run
        self.change = change
        self._prepared: topology.PreparedChange | None = None

    @property
    def phase(self) -> str:
        return str(self._run.arguments["current"]["phase"])

    @property
    def comment(self) -> str:
        """The text about the change in the history of the topology.

        For example, "shard 3 of group 'photos' moved from db1 to db2".
        """
        raise NotImplementedError

    def confirm(self) -> None:
        """Check that no other process has taken over the run. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note()

    def prepare(self) -> None:
        """Make and check, in advance, the topology that :meth:`publish` will publish.

        Call this before statements on the shard must wait for the change. Then :meth:`publish` has
        less to do while they wait.

        :raises: the errors of :meth:`publish`. Nothing was published.
        """
        self._prepared = topology.prepare(self.change.publish_in)

    def publish(self) -> int:
        """Publish the topology with the change. This commits the change.

        Return the version of the published topology. This process may use an earlier version until
        it refreshes its topology.

        :raises LeaseLost: another process has taken over the run.
        :raises TopologyError: the topology was not published, or it is not known whether it was.
        :raises: the errors of the change's ``publish_in()``, for example if the shard has been
            moved to a node that the change does not mention.
        """
        change = self.change

        def edit(document: Document) -> Document:
            # Stop here if another process has taken over the run. A process that takes it over
            # after this check calls rule_out(), which publishes a new version of the topology. Then
            # the source refuses this document, because it was made from the version before.
            self.confirm()
            return change.publish_in(document)

        if self._prepared is not None:
            # Try the prepared topology. The source refuses it if a newer version was published
            # meanwhile, for example by a process that has taken over the run. Then continue below
            # with the newer version. There, ``edit`` checks whether the run was taken over.
            with suppress(TopologyConflict):
                topology.publish_prepared(self._prepared, self.comment)
                return self._prepared.after.version
        return topology.change(edit, self.comment).version

    def rule_out(self) -> bool:
        """Ensure that the change will never be published. Return False if it is published already.

        A process may have sent the changed topology a moment ago. After this call, the source
        refuses it.

        If the source does not answer, the query is repeated for some seconds, because nobody can
        write to the shard until the answer is known.

        :raises LeaseLost: another process has taken over the run.
        :raises TopologyError: the source of the topology does not answer.
        """
        comment = f"{self.noun} of {self.change} broken off"
        deadline = time.monotonic() + SOURCE_PATIENCE
        while True:
            self._run.check()
            try:
                return topology.rule_out(self.change.is_published, comment)
            except (TopologyError, OSError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(_INTERVAL)


def require_publication(
    changes: Sequence[ShardChange],
    refusal: type[MoveRefused] | type[SwitchRefused],
    *,
    subject: str,
    done: str,
    news: str,
) -> None:
    """Check that the topology with all ``changes`` can be published. One round trip to its source.

    :param refusal: the class of the error to raise if this process uses a topology that is not from
        the settings, as test runs do. Otherwise a test could move shards of the real nodes.
    :param subject, done, news: phrases for the messages. For example, "Shards", "moved" and "where
        a shard is" give the message "Shards cannot be moved …: every process must learn at once
        where a shard is".
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises TopologyError: the source does not answer, or the changed topology is not valid.
    """
    if runtime.topology() is not runtime.config().topology:
        raise refusal(
            [
                "this process uses another topology than the configured one, as test runs do: shards of"
                f" the real nodes would be {done}"
            ]
        )
    document = topology.current()
    for change in changes:
        document = change.publish_in(document)
    runtime.check_document(document.at_version(document.version + 1))
    source = runtime.source()
    if not source.writable:
        raise TopologyReadOnly(
            f"{subject} cannot be {done} with {source.describe()}, which commands do not write: every"
            f" process must learn at once {news}. Use the source 'database' or 'zookeeper'"
            " (SHARDED_ORM['TOPOLOGY'])."
        )


def note_on_followers(effect: str) -> str | None:
    """Wait until every process uses the new topology, for :data:`FOLLOWERS_PATIENCE` seconds at
    most.

    Return a note about the processes that still use an older one. Return None if there are none, or
    if the source does not record which processes are connected.

    :param effect: the end of the note, which says what these processes do, such as "look it up at
        their next statement".
    """
    try:
        reach = topology.wait_until_used(runtime.topology_status().version, FOLLOWERS_PATIENCE)
    except TopologyError as exc:
        return f"whether all processes follow is not known ({exc})"
    if reach is None or not reach.behind:
        return None
    late = ", ".join(f"{process.host} ({process.pid})" for process in reach.behind)
    return f"processes that do not use the new topology yet ({late}) {effect}"
