"""Changing the topology, for all commands that do so.

The *topology* is a versioned document with nodes, groups and ranges. Its *source* stores it for all
processes.
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

# Give up after this many publish conflicts.
_ATTEMPTS = 20
# Seconds that the longest wait before an attempt grows with each conflict.
_BACKOFF = 0.02
# Seconds between two checks whether all processes follow.
_INTERVAL = 0.05


def current() -> Document:
    """Return the document that the source holds now, which this process may not use yet.

    One round trip.

    :raises TopologyError: the source does not answer, is empty, or holds no valid document.
    """
    source = runtime.source()
    document = source.load()
    if document is None:
        raise TopologyUnavailable(f"{source.describe()} holds no topology yet; push one.")
    return document


def change(edit: Callable[[Document], Document], comment: str = "") -> Document:
    """Edit the current document and publish the result; this process uses it on return.

    The result is checked, as every process checks it, before it is published. Nothing is published
    if ``edit`` changes nothing.

    :param edit: returns the changed document, with any version. Called again whenever another
        process has published in between.
    :param comment: a text for the history.
    :return: the document as it was published.
    :raises InvalidTopology: the result is wrong, or must not follow the topology in use.
    :raises TopologyReadOnly: the source cannot be written; the message is the change to make.
    :raises TopologyConflict: other processes have published before each attempt.
    :raises TopologyUnavailable: the source does not answer.
    """
    for attempt in range(_ATTEMPTS):
        # A random time, so that two conflicting processes do not meet again.
        time.sleep(random.uniform(0, _BACKOFF * attempt))
        before = current()
        edited = edit(before)
        if edited.same_content(before):
            return before
        # Refuses a document older than the topology in use, such as that of a source restored from
        # a backup: a small change must not give it a new version.
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
class Pushed:
    """The outcome of :func:`push`.

    :param document: the document that the source holds, with its version.
    :param published: False if the source had the same content before. Then there is no new version,
        and the comment is not stored.
    """

    document: Document
    published: bool


def push(document: Document, comment: str = "") -> Pushed:
    """Publish ``document``; this process uses it on return.

    The document's version is the one from which it was made. If nothing was published since, it
    becomes the next version; a higher version is kept. Nothing is published if the source has the
    same content already, and this process uses it.

    :raises TopologyConflict: the source holds a later version.
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

    :param expected: the version that the source must still hold, because the caller has decided by
        it; 0 if the source was empty.
    :raises LookupError: the source does not keep that version.
    :raises TopologyConflict: the source holds another version than ``expected``.
    :raises: the errors of :func:`push`: shards that were added since cannot be removed.
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
    """The document that the source holds; None if it is empty or its content is not valid."""
    try:
        return runtime.source().load()
    except InvalidTopology:
        # Somebody has edited the source by hand. The next publication replaces the content.
        return None


def _is_used(document: Document) -> bool:
    """Whether this process uses the document of the source; it may have refused it."""
    try:
        runtime.refresh()
        return runtime.document() == document
    except TopologyError:
        return False


def _next(before: Document | None) -> int:
    """The version after that of the source and after that in use here.

    The version in use is newer if the source was set up again.
    """
    try:
        version = runtime.topology_status().version
    except TopologyUnavailable:
        version = 0
    return max(version, 0 if before is None else before.version) + 1


def _publish(before: Document | None, after: Document, comment: str) -> Document:
    source = runtime.source()
    # A present document that this process refuses must not prevent the publication.
    runtime.check_document(after)
    if not source.writable:
        raise TopologyReadOnly(
            _manual_change(source.describe(), before or Document(0, {}, {}), after)
        )
    expected = 0 if before is None else before.version
    source.publish(after, expected=expected, comment=comment)
    runtime.refresh(at_least=after.version)
    return after


def _manual_change(source_name: str, before: Document, after: Document) -> str:
    lines = "".join(f"\n  - {line}" for line in before.differences(after))
    count = f", and the version to {after.version}" if before.version else ""
    return (
        f"The topology lives in {source_name}, which commands do not write. Make this change there{count}"
        f":{lines}"
    )


@dataclass(frozen=True)
class Reach:
    """The other connected processes, by whether they use a version, as far as the source knows."""

    using: tuple[Process, ...]
    behind: tuple[Process, ...]


def wait_until_used(version: int, timeout: float) -> Reach | None:
    """Wait until every other connected process uses ``version`` or a later one.

    This process does not count: it uses what it has published.

    :param timeout: seconds to wait; the answer lists the processes that are behind after that.
    :return: None if the source does not know the processes.
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
        time.sleep(_INTERVAL)
