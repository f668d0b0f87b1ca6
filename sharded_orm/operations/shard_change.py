"""Changes of the node on which a shard takes writes: a move to a node, and a switch of a pair's sides.

A change is committed at the moment when the new topology, the map of shards to nodes, is published.
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

#: The largest number of seconds to wait, at the end of a run, until every process uses the new
#: topology.
FOLLOWERS_PATIENCE: Final = 10.0
#: If the source of the topology does not answer whether a change is published, the query is repeated
#: for at most this number of seconds.
SOURCE_PATIENCE: Final = 15.0
# If the source of the topology does not answer, it is queried again after this number of seconds.
_INTERVAL: Final = 0.5


@dataclass(frozen=True)
class ShardChange:
    """The change of the node on which a shard takes writes, from ``source`` to ``target``."""

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
        """Return a ``Shard`` object of this shard whose node is ``node``, wherever the shard is now."""
        return replace(runtime.shard(self.group, self.number), node=node)

    def is_published(self, document: Document) -> bool:
        """Return whether the shard takes writes on ``target`` by the topology in ``document``."""
        entry = entry_of(document.content(), self.group, self.number)
        return entry is not None and primary_of(entry) == self.target

    def publish_in(self, document: Document) -> Document:
        """Return a copy of ``document`` with the change. If ``document`` already contains the
        change, return ``document`` itself.
        """
        raise NotImplementedError


C = TypeVar("C", bound=ShardChange)


class ShardChangeRecord(Generic[C]):
    """The record of the change of one shard.

    It is a part of the run in the journal. So if another process takes over the run, this process can
    record nothing more.

    :param run: the run, which this process holds.
    """

    #: The noun for such a change in the history of the topology.
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
        """The comment on the change in the history of the topology."""
        raise NotImplementedError

    def confirm(self) -> None:
        """Check that no other process has taken over the run. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note()

    def prepare(self) -> None:
        """Make and check the topology that :meth:`publish` will publish.

        Call this before statements on the shard begin to wait, so that they wait for a shorter
        time.

        :raises: the errors of :meth:`publish`. Nothing was published.
        """
        self._prepared = topology.prepare(self.change.publish_in)

    def publish(self) -> int:
        """Publish the topology with the change. This commits the change.

        Return the version of the topology. This process may still use an earlier one.

        :raises LeaseLost: another process has taken over the run.
        :raises TopologyError: the topology was not published, or it is not known whether it was.
        :raises: the errors of the change's ``publish_in()``, for example if the shard has been
            moved to a node that the change does not mention.
        """
        change = self.change

        def edit(document: Document) -> Document:
            # Another process may take over the run after this check. That process publishes a new
            # version of the topology, so that the publication of this document is refused.
            self.confirm()
            return change.publish_in(document)

        if self._prepared is not None:
            # The publication of the prepared topology fails if a newer version was published
            # meanwhile, for example by a process that has taken over the run. Then continue below:
            # ``edit`` checks whether the run was taken over.
            with suppress(TopologyConflict):
                topology.publish_prepared(self._prepared, self.comment)
                return self._prepared.after.version
        return topology.change(edit, self.comment).version

    def rule_out(self) -> bool:
        """Ensure that the change will never be published, even if a process has sent the changed
        topology a moment ago.

        If the source of the topology does not answer, the query is repeated for some seconds, because
        nobody can write to the shard until the answer is known.

        Return True if the change is ruled out, False if it is published already.

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

    :param refusal: the class of the error to raise if this process does not use the configured
        topology, as in test runs.
    :param subject, done: what is changed and how, for the messages, such as "shards" and "moved".
    :param news: for the messages, too: the fact of which every process must be informed at once.
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
    """Wait until every process uses the new topology. Return a note about those that do not.

    :param effect: what such processes do until then, as the predicate of a sentence, such as "look
        it up at their next statement".
    :returns: None if every process uses it, or if the source does not record which processes are
        connected.
    """
    try:
        reach = topology.wait_until_used(runtime.topology_status().version, FOLLOWERS_PATIENCE)
    except TopologyError as exc:
        return f"whether all processes follow is not known ({exc})"
    if reach is None or not reach.behind:
        return None
    late = ", ".join(f"{process.host} ({process.pid})" for process in reach.behind)
    return f"processes that do not use the new topology yet ({late}) {effect}"
