"""Read and change the topology. All commands that change the topology call this module.

The *topology* says which nodes and groups exist, and which range of shards is on which node. It is
a document with a version number. The *source*, such as a file or ZooKeeper, stores the document for
all processes.
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

# The largest number of attempts to publish a change. An attempt fails if another process has
# published after this process had read the document.
_ATTEMPTS = 20
# The second attempt begins after a random time of 0 to this number of seconds, the third after 0 to
# twice this number, and so on.
_BACKOFF = 0.02
# A caller that waits until all processes use a new version of the topology queries their versions
# again and again. This is the number of seconds between two of these queries.
_INTERVAL = 0.05


def current() -> Document:
    """Read the topology document from its source. This process may still use an older one.

    Costs one round trip.

    :raises TopologyError: the source does not answer, is empty, or holds no valid document.
    """
    source = runtime.source()
    document = source.load()
    if document is None:
        raise TopologyUnavailable(f"{source.describe()} holds no topology yet; push one.")
    return document


def change(edit: Callable[[Document], Document], comment: str = "") -> Document:
    """Change the topology document and publish it. On return, this process uses the new document.

    Every process that loads a document checks it. This process makes the same checks before it
    publishes the new document. If ``edit`` changes nothing, nothing is published.

    :param edit: a function that gets the current document and returns the changed document. Its
        version number is ignored. If another process publishes meanwhile, ``edit`` is called again
        with the newer document.
    :param comment: a text that is stored in the history of the topology.
    :return: the published document, or the current document if nothing was published.
    :raises InvalidTopology: the changed document is not valid, or must not replace the topology
        that this process uses, for example because it lacks shards.
    :raises TopologyReadOnly: this process cannot write to the source. The message lists the changes
        that somebody has to make there by hand.
    :raises TopologyConflict: other processes have published first, again and again.
    :raises TopologyUnavailable: the source does not answer.
    """
    for attempt in range(_ATTEMPTS):
        # If two processes have tried to publish at the same moment, one of them has failed. Wait
        # for a random time, so that they do not collide again.
        time.sleep(random.uniform(0, _BACKOFF * attempt))
        before = current()
        edited = edit(before)
        if edited.same_content(before):
            return before
        # If somebody has restored the source from a backup, its document may be older than the
        # topology that this process uses. Then refresh() raises an error. Otherwise, an edited copy
        # of the old document would be published as the newest version.
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

    :param before: the document that the change is based on.
    :param after: the changed document, which can be published.
    """

    before: Document
    after: Document


def prepare(edit: Callable[[Document], Document]) -> PreparedChange:
    """Make and check a change as :func:`change` does, but do not publish it.

    Use this if the statements on a shard wait while the topology is changed. If the change is
    prepared before the wait begins, they wait only for :func:`publish_prepared`, which is faster.

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
    :raises TopologyConflict: another process has published after the change was prepared.
    :raises TopologyUnavailable: the source does not answer.
    """
    source, version = runtime.source(), prepared.before.version
    source.publish(prepared.after, expected=version, comment=comment)


def rule_out(is_published: Callable[[Document], bool], comment: str = "") -> bool:
    """Ensure that a change of another process is not published later.

    Call this if another process may have sent the change to the source, and it is not known whether
    the change has arrived. This function publishes the present topology as a new version. Each
    publication names the version that it replaces, and the source refuses it if that version is not
    the newest. So a change that arrives later is refused.

    :param is_published: a function that gets a document and returns whether it has the change.
    :return: True if the change will never be published, False if it is published already.
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

    :param document: the document to publish, usually an edited copy of a document from the source.
        Its ``version`` is the version of that document.
    :raises TopologyConflict: the source has a later version than ``document.version``: somebody has
        published since the copy was made.
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
    :param expected: the version that was the newest when the caller decided to roll back; 0 if the
        source was empty. If somebody else has published a version since then, an error is raised,
        because the rollback would undo that change by mistake. By default, this is not checked.
    :raises LookupError: the source does not have ``version``.
    :raises TopologyConflict: the newest version is not ``expected``.
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
        # The stored document is not valid, for example because somebody has edited it by hand.
        # Return None, as if there were no document, so that a valid one can be published in its
        # place.
        return None


def _is_used(document: Document) -> bool:
    """Load the topology from its source. Return whether this process uses ``document`` then.

    Return False if the process refuses the topology, or if the source does not answer.
    """
    try:
        runtime.refresh()
        return runtime.document() == document
    except TopologyError:
        return False


def _next(before: Document | None) -> int:
    """Return the version number of the next topology document.

    It is 1 more than the version in the source. But if the source was emptied and set up again,
    this process may still use a version that is higher than the one in the source. Then the result
    is 1 more than the version in use, because processes refuse to go back to a lower version.

    :param before: the document in the source; None if the source is empty.
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
    # Check only the new document. ``before`` may be invalid, for example after a mistake in an edit
    # by hand. Then it must be possible to replace it by ``after``.
    try:
        runtime.check_document(after)
    except InvalidTopology as exc:
        if _version_in_use() < after.version:
            raise
        # ``after`` was refused because this process already uses a version with the same number or
        # a higher one. So another process has published a change meanwhile.
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
    """Which other processes use a new version of the topology already, and which do not.

    :param using: processes that use the version for which the caller waits, or a later one.
    :param behind: processes that still use an earlier version.
    """

    using: tuple[Process, ...]
    behind: tuple[Process, ...]


def wait_until_used(version: int, timeout: float, *, interval: float = _INTERVAL) -> Reach | None:
    """Wait until all other processes use ``version`` of the topology or a later one.

    Only processes that are connected to the source of the topology are known. This process is left
    out, because it uses the version that it has published.

    :param timeout: the largest number of seconds to wait.
    :param interval: the number of seconds between two queries of the source.
    :return: which processes use the version when the wait ends; None if the source does not record
        which processes are connected to it.
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
