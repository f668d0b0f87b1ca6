"""Read and change the topology, for all commands that do so.

The *topology* is a versioned document of nodes, groups and ranges of shards. The *source*, such as a
file or ZooKeeper, stores the topology for all processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.exceptions import (
    InvalidTopology,
    TopologyConflict,
    TopologyError,
    TopologyReadOnly,
    TopologyUnavailable,
)
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import Process

# The largest number of attempts to publish. An attempt fails if another process has published a
# change since the document was read.
_ATTEMPTS = 20
# Seconds. Before attempt number n to publish, counted from 0, the process waits for a random time
# between 0 and n times this value.
_BACKOFF = 0.02
# The number of seconds between two checks whether all processes use a certain version of the
# topology.
_INTERVAL = 0.05


def current() -> Document:
    """Return the document that the source holds now. This process may still use an older one.

    Costs one round trip.

    :raises TopologyError: the source does not answer, is empty, or holds no valid document.
    """
    source = runtime.source()
    document = source.load()
    if document is None:
        raise TopologyUnavailable(f"{source.describe()} holds no topology yet; push one.")
    return document


def change(edit: Callable[[Document], Document], comment: str = "") -> Document:
    """Edit the current document and publish the result. On return, this process uses the result.

    The result first passes the same checks as in every process that loads a topology. If ``edit``
    changes nothing, nothing is published.

    :param edit: a function that gets the current document and returns the changed document, whose
        version is ignored. ``edit`` is called again, with the newer document, each time another
        process has published meanwhile.
    :param comment: a text to be stored in the history of the topology.
    :return: the published document, or the current document if nothing was published.
    :raises InvalidTopology: the result is not valid, or is not a permitted successor of the
        topology that this process uses.
    :raises TopologyReadOnly: this process cannot write to the source. The message lists the changes
        to make there by hand.
    :raises TopologyConflict: each attempt failed, because another process had published first.
    :raises TopologyUnavailable: the source does not answer.
    """
    for attempt in range(_ATTEMPTS):
        # The wait is random, so that two processes in conflict do not publish at the same moment
        # again.
        time.sleep(random.uniform(0, _BACKOFF * attempt))
        before = current()
        edited = edit(before)
        if edited.same_content(before):
            return before
        # refresh() raises an error if the source's document is older than the topology in use, such
        # as after a restore from a backup. Without this call, the old content would be published as
        # the newest version.
        runtime.refresh()
        try:
            return _publish(before, edited.at_version(_next(before)), comment)
        except TopologyConflict:
            continue
    raise TopologyConflict(
        f"{runtime.source().describe()} was changed by others {_ATTEMPTS} times while this change"
        " was made; repeat it."
    )


@dataclass(frozen=True)
class PreparedChange:
    """A change of the topology that was made and checked, but not published; see :func:`prepare`.

    :param before: the document that the source of the topology held.
    :param after: the document to publish.
    """

    before: Document
    after: Document


def prepare(edit: Callable[[Document], Document]) -> PreparedChange:
    """Make and check a change as :func:`change` does, for :func:`publish_prepared`. Publishes nothing.

    :raises: the errors of :func:`change`.
    """
    before = current()
    runtime.refresh()
    after = edit(before).at_version(_next(before))
    _check(before, after)
    return PreparedChange(before, after)


def publish_prepared(prepared: PreparedChange, comment: str = "") -> None:
    """Publish the change ``prepared``. Afterwards this process still uses its old topology.

    :param prepared: the result of :func:`prepare`.
    :raises TopologyConflict: another process has published since the change was prepared.
    :raises TopologyUnavailable: the source does not answer.
    """
    source, version = runtime.source(), prepared.before.version
    source.publish(prepared.after, expected=version, comment=comment)


def rule_out(is_published: Callable[[Document], bool], comment: str = "") -> bool:
    """Ensure that a change which a process may have sent just now will never be published.

    Publish the present topology as a new version. The publication of the change then fails, because
    it names the version that it replaces, and the source accepts only one publication for each
    version.

    :param is_published: a function that returns whether a document has the change.
    :return: True if the change is ruled out, False if it is published already.
    :raises TopologyUnavailable: the source of the topology does not answer.
    """
    source = runtime.source()
    while True:
        document = current()
        if is_published(document):
            return False
        version = document.version
        try:
            source.publish(document.at_version(version + 1), expected=version, comment=comment)
        except TopologyConflict:
            continue
        return True


@dataclass(frozen=True)
class Pushed:
    """The outcome of :func:`push`.

    :param document: the topology document that is published after the call, with its version.
    :param published: True if the call has published a new version. False if the same content was
        published already: then there is no new version, and the call's comment is not stored.
    """

    document: Document
    published: bool


def push(document: Document, comment: str = "") -> Pushed:
    """Publish ``document``. On return, this process uses it.

    If the source has the same content, and this process uses it, nothing is published. Otherwise
    ``document`` becomes the next version, or version ``document.version`` if that number is higher.

    :param document: the document to publish. Its ``version`` is the version that it was made from.
    :raises TopologyConflict: the source holds a later version than ``document.version``.
    :raises: the errors of :func:`change`.
    """
    before = held()
    if before is not None and document.same_content(before) and _is_used(before):
        return Pushed(before, published=False)
    version = 0 if before is None else before.version
    if document.version < version:
        raise TopologyConflict(
            f"{runtime.source().describe()} holds version {version} by now; this one was made from"
            f" {document.version}. Pull it, repeat the change, and push again."
        )
    next_version = _next(before)
    published = _publish(before, document.at_version(max(document.version, next_version)), comment)
    return Pushed(published, published=True)


def rollback(version: int, comment: str = "", *, expected: int | None = None) -> Document:
    """Publish the content of an earlier version again, as the next version.

    :param version: the earlier version.
    :param expected: the version that the source held when the caller decided to roll back; 0 if the
        source was empty. By default, the source may hold any version.
    :raises LookupError: the source does not keep ``version``.
    :raises TopologyConflict: the version that the source holds now is not ``expected``.
    :raises InvalidTopology: shards were added since ``version``; they cannot be removed.
    :raises: the other errors of :func:`push`.
    """
    before = held()
    version_held = 0 if before is None else before.version
    if expected is not None and version_held != expected:
        raise TopologyConflict(
            f"{runtime.source().describe()} holds version {version_held} by now, not {expected}: somebody"
            " else has published. Look at it, and repeat this."
        )
    earlier = runtime.source().revision(version).at_version(_next(before))
    return _publish(before, earlier, comment or f"back to version {version}")


def held() -> Document | None:
    """Return the document in the source; None if the source is empty or the document is not valid.

    :raises TopologyUnavailable: the source does not answer.
    """
    try:
        return runtime.source().load()
    except InvalidTopology:
        # The stored topology is not valid: somebody may have edited it by hand. Return None, as if
        # there were no topology, so that a valid document can be published over it.
        return None


def _is_used(document: Document) -> bool:
    """Return whether this process uses ``document``, the topology that is published now.

    First load the topology from its source. Return False if the process refuses that topology, or
    if the source does not answer.
    """
    try:
        runtime.refresh()
        return runtime.document() == document
    except TopologyError:
        return False


def _next(before: Document | None) -> int:
    """Return the version number for the next topology document to publish.

    It is 1 more than the version that is published, or than the version that this process uses if
    that is higher, as after the source was set up again.

    :param before: the published document; None if the source is empty.
    """
    return max(_version_in_use(), 0 if before is None else before.version) + 1


def _version_in_use() -> int:
    try:
        return runtime.topology_status().version
    except TopologyUnavailable:
        return 0


def _publish(before: Document | None, after: Document, comment: str) -> Document:
    _check(before, after)
    expected = 0 if before is None else before.version
    runtime.source().publish(after, expected=expected, comment=comment)
    runtime.refresh(at_least=after.version)
    return after


def _check(before: Document | None, after: Document) -> None:
    source = runtime.source()
    # Check only the new document. This process may refuse the published one, and it must be
    # possible to replace it.
    try:
        runtime.check_document(after)
    except InvalidTopology as exc:
        if _version_in_use() < after.version:
            raise
        # Another process has published this version meanwhile, and this process has received it.
        raise TopologyConflict(
            f"{source.describe()} was changed by others meanwhile, to version {_version_in_use()};"
            " repeat the change."
        ) from exc
    if not source.writable:
        raise TopologyReadOnly(
            _manual_change(source.describe(), before or Document(0, {}, {}), after)
        )


def _manual_change(source_name: str, before: Document, after: Document) -> str:
    lines = "".join(f"\n  - {line}" for line in before.differences(after))
    count = f", and the version to {after.version}" if before.version else ""
    return (
        f"The topology lives in {source_name}, which commands do not write. Make this change there{count}"
        f":{lines}"
    )


@dataclass(frozen=True)
class Reach:
    """The other processes that are connected to the source of the topology, by the version they
    use.

    :param using: processes that use the version that the caller waits for, or a later version.
    :param behind: processes that use an earlier version.
    """

    using: tuple[Process, ...]
    behind: tuple[Process, ...]


def wait_until_used(version: int, timeout: float, *, interval: float = _INTERVAL) -> Reach | None:
    """Wait until all other processes use ``version`` of the topology or a later one.

    The other processes are those that are connected to the topology's source (its store). This
    process is left out, because it already uses the version that it has published.

    :param timeout: the largest number of seconds to wait.
    :param interval: the number of seconds between two checks.
    :return: the other processes, as they are at the end of the wait; None if the source does not
        record which processes are connected to it.
    """
    source = runtime.source()
    deadline = time.monotonic() + timeout
    while True:
        processes = source.processes()
        if processes is None:
            return None
        others = [process for process in processes if not process.own]
        behind = tuple(process for process in others if process.version < version)
        if not behind or time.monotonic() >= deadline:
            return Reach(tuple(process for process in others if process.version >= version), behind)
        time.sleep(interval)
