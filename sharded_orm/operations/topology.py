"""Changing the topology: what every command that does so goes through."""

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

# A change that was computed anew this often has somebody against it who is faster.
_ATTEMPTS = 20
# Seconds, times the attempts so far: at most so long is waited before the next one.
_BACK_OFF = 0.02
# Seconds between two looks at the processes that are still to follow.
_INTERVAL = 0.05


def current() -> Document:
    """What the source holds now, apart from what this process uses. Costs one round trip.

    :raises TopologyError: the source does not answer, is empty, or holds no document.
    """
    source = runtime.source()
    found = source.load()
    if found is None:
        raise TopologyUnavailable(f"{source.describe()} holds no topology yet; push one.")
    return found


def change(edit: Callable[[Document], Document], comment: str = "") -> Document:
    """Publish what ``edit`` makes of the current document; this process uses it on return.

    ``edit`` may be called several times: whenever somebody else has published in between.
    Its version does not matter. It is checked as by every process before it is published;
    nothing is published if it is what is there already.

    :param comment: for the history.
    :return: the document as it was published.
    :raises InvalidTopology: it is wrong, or must not follow what is in use.
    :raises TopologyReadOnly: the source cannot be written; the message is the change to make.
    :raises TopologyConflict: others publish all the time.
    :raises TopologyUnavailable: the source does not answer.
    """
    for attempt in range(_ATTEMPTS):
        # At random: two who meet must not meet again.
        time.sleep(random.uniform(0, _BACK_OFF * attempt))
        before = current()
        edited = edit(before)
        if edited.same_content(before):
            return before
        # Refuses what is older than what is in use, as of a source that was set up again from a
        # backup: it must not get a new version by a small change.
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
    """What became of :func:`push`.

    :param document: as the source holds it, with its version.
    :param published: False if that was so before: there is no new version, and so no place for
        the comment.
    """

    document: Document
    published: bool


def push(document: Document, comment: str = "") -> Pushed:
    """Publish ``document``; this process uses it on return.

    Its version tells which one it was made from: it becomes the next version, if nothing was
    published since. A higher one is kept. Nothing is published if the source holds the same
    content already, and this process uses it.

    :raises: what :func:`change` raises, and :exc:`TopologyConflict` if it is not made from what
        is there now.
    """
    before = held()
    if before is not None and document.same_content(before) and _is_used(before):
        return Pushed(before, published=False)
    there = 0 if before is None else before.version
    if document.version < there:
        raise TopologyConflict(
            f"{runtime.source().describe()} holds version {there} by now; this one was made from"
            f" {document.version}. Pull it, repeat the change, and push again."
        )
    following = _next(before)
    made = _publish(before, document.at_version(max(document.version, following)), comment)
    return Pushed(made, published=True)


def rollback(version: int, comment: str = "", *, expected: int | None = None) -> Document:
    """Publish the content of an earlier version once more, as the next version.

    :param expected: what the source must hold still, for somebody who has decided by that version;
        0 if it held none.
    :raises LookupError: the source does not keep that version.
    :raises TopologyConflict: it holds another version than ``expected``.
    :raises: what :func:`push` raises: shards that were added since cannot be taken away.
    """
    before = held()
    found = 0 if before is None else before.version
    if expected is not None and found != expected:
        raise TopologyConflict(
            f"{runtime.source().describe()} holds version {found} by now, not {expected}: somebody"
            " else has published. Look at it, and repeat this."
        )
    again = runtime.source().revision(version).at_version(_next(before))
    return _publish(before, again, comment or f"back to version {version}")


def held() -> Document | None:
    """What the source holds; None for nothing, and for what is no document."""
    try:
        return runtime.source().load()
    except InvalidTopology:
        # Written by hand into the source. What is published now takes its place.
        return None


def _is_used(document: Document) -> bool:
    """Whether this process uses what the source holds. It may refuse that."""
    try:
        runtime.refresh()
        return runtime.document() == document
    except TopologyError:
        return False


def _next(before: Document | None) -> int:
    """After what the source holds, and after what this process uses: that may be newer, when
    the source was set up again."""
    try:
        used = runtime.topology_status().version
    except TopologyUnavailable:
        used = 0
    return max(used, 0 if before is None else before.version) + 1


def _publish(before: Document | None, after: Document, comment: str) -> Document:
    source = runtime.source()
    # What is there may be refused by this process, and then must not be in the way.
    runtime.check_document(after)
    if not source.writable:
        raise TopologyReadOnly(_to_do(source.describe(), before or Document(0, {}, {}), after))
    expected = 0 if before is None else before.version
    source.publish(after, expected=expected, comment=comment)
    runtime.refresh(at_least=after.version)
    return after


def _to_do(where: str, before: Document, after: Document) -> str:
    lines = "".join(f"\n  - {line}" for line in before.differences(after))
    count = f", and the version to {after.version}" if before.version else ""
    return (
        f"The topology lives in {where}, which commands do not write. Make this change there{count}"
        f":{lines}"
    )


@dataclass(frozen=True)
class Reach:
    """Which of the other processes that are connected use a version, as far as the source knows."""

    using: tuple[Process, ...]
    behind: tuple[Process, ...]


def wait_until_used(version: int, timeout: float) -> Reach | None:
    """Wait until every other process that is connected uses ``version`` or a later one.

    This one is not waited for, and not counted: it uses what it has published.

    :param timeout: seconds. After them, those that are behind are in the answer.
    :return: None where the source does not know the processes.
    """
    source = runtime.source()
    end = time.monotonic() + timeout
    while True:
        found = source.processes()
        if found is None:
            return None
        others = [one for one in found if not one.own]
        behind = tuple(one for one in others if one.version < version)
        if not behind or time.monotonic() >= end:
            return Reach(tuple(one for one in others if one.version >= version), behind)
        time.sleep(_INTERVAL)
