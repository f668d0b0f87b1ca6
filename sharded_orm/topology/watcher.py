"""Keeps the topology of a process up to date with its source.

A document is used only if it is valid and may follow the one in use. Any other is logged, and
the document in use stays in use (DESIGN decision 9).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from sharded_orm.exceptions import InvalidTopology, TopologyError, TopologyUnavailable
from sharded_orm.topology.document import Document
from sharded_orm.topology.last_good import LastGoodCopy
from sharded_orm.topology.sources.base import TopologySource

logger = logging.getLogger("sharded_orm.topology")
T = TypeVar("T")


class Origin(StrEnum):
    """Where the topology of a process comes from."""

    SETTINGS = "settings"
    SOURCE = "source"
    LAST_GOOD = "last good copy"


@dataclass(frozen=True)
class TopologyStatus:
    """Which topology a process uses, since when, and why it has refused a newer document."""

    version: int
    origin: Origin
    since: datetime
    #: Why the newest document is not used, or cannot be read; empty if it is in use.
    refused: tuple[str, ...] = ()


class TopologyWatcher(Generic[T]):
    """Checks the documents of a source, and decides which one a process uses.

    Not thread-safe: the caller has a lock.

    :param check: turns a document into the value that the process uses, such as its checked
        configuration. The second argument is the value before it (None at the start). Raises
        :exc:`InvalidTopology`.
    """

    def __init__(self, source: TopologySource, check: Callable[[Document, T | None], T]) -> None:
        self.source = source
        # Document and value are one attribute: a child forked at any moment has both, or neither.
        self._used: tuple[Document | None, T | None] = (None, None)
        self.status = TopologyStatus(0, Origin.SETTINGS, datetime.now(UTC))
        self._check = check
        self._refused: Document | None = None
        self._copy = None if source.last_good is None else LastGoodCopy(Path(source.last_good))

    @property
    def document(self) -> Document | None:
        """The document in use; None before :meth:`begin`."""
        return self._used[0]

    @property
    def value(self) -> T | None:
        """The value of the document in use; None before :meth:`begin`."""
        return self._used[1]

    def of_child(self, source: TopologySource) -> TopologyWatcher[T]:
        """The watcher of a forked child: the same document with another source."""
        child = TopologyWatcher(source, self._check)
        child._used = self._used
        assert child.document is not None
        # A thread of the parent may have replaced the document, and not the status yet.
        child.status = replace(self.status, version=child.document.version)
        source.using(child.document.version)
        return child

    def begin(self) -> T:
        """Use the document of the source, or else the last good copy, and return its value.

        :raises TopologyUnavailable: neither can be used.
        """
        copy = self._read_copy()
        try:
            document = self.source.load()
            if document is None:
                raise InvalidTopology(["nothing was pushed there yet"], self.source.describe())
            # The document follows the copy, unless both are the same.
            value = self.value if document == copy else self.check(document)
            changes = self._changes_to(document)
        except Exception as exc:
            refusal = refusal_of(exc)
            if copy is None:
                raise self._unavailable(refusal) from exc
            assert self._copy is not None and self.value is not None
            logger.error(
                "%s. Going on with the last good copy in %s: version %d, saved at %s.",
                str(refusal).rstrip("."), self._copy.path, copy.version, self._copy.saved_at(),
            )  # fmt: skip
            self.status = TopologyStatus(
                copy.version, Origin.LAST_GOOD, datetime.now(UTC), _problems(refusal)
            )
            self.source.using(copy.version)
            return self.value
        assert value is not None
        self._take(document, value, changes)
        return value

    def check(self, document: Document) -> T:
        """The value of ``document``, if it may be used now.

        :raises InvalidTopology: it may not; lists every reason.
        """
        if not self.source.allows_credentials and (problems := document.credentials()):
            raise InvalidTopology(problems)
        return self._check(document, self.value)

    def consider(self, document: Document | TopologyError, use: Callable[[T], None]) -> bool:
        """Use a document that has arrived, if it may be used. Whether that changes anything.

        :param use: begins to use a document's value, or raises and changes nothing.
        :raises TopologyError: the document is refused for any reason, which is logged once.
        """
        if isinstance(document, TopologyError):
            self._log_refusal(document, None)
            raise document
        if document == self.document:
            if self.status.origin is Origin.LAST_GOOD or self.status.refused:
                logger.info("%s has version %d, which is in use.", self.source.describe(), document.version)  # fmt: skip
                self.status = TopologyStatus(document.version, Origin.SOURCE, self.status.since)
            self._refused = None
            return False
        try:
            value = self.check(document)
            changes = self._changes_to(document)
            # Nothing after this fails: the document is in use.
            use(value)
        except Exception as exc:
            refusal = refusal_of(exc)
            self._log_refusal(refusal, document)
            raise refusal from exc
        self._take(document, value, changes)
        return True

    def _log_refusal(self, exc: TopologyError, document: Document | None) -> None:
        problems = _problems(exc)
        if problems == self.status.refused and document == self._refused:
            return
        self._refused = document
        self.status = replace(self.status, refused=problems)
        logger.error(
            "%s: %s is refused, version %d stays in use. %s",
            self.source.describe(),
            "what it holds" if document is None else f"version {document.version}",
            self.status.version,
            exc,
        )

    def _changes_to(self, document: Document) -> str:
        """The changes for the log; empty if ``document`` is in use already, or none is in use."""
        before = self.document
        if before is None or before == document:
            return ""
        return "; ".join(before.differences(document)) or "no difference"

    def _take(self, document: Document, value: T, changes: str) -> None:
        before, self._used = self.document, (document, value)
        self._refused = None
        self.status = TopologyStatus(document.version, Origin.SOURCE, datetime.now(UTC))
        if before is not None and changes:
            logger.info(
                "Version %d of the topology takes the place of version %d: %s.",
                document.version, before.version, changes,
            )  # fmt: skip

    def keep(self) -> None:
        """Save the document in use as the last good copy, and announce its version at the source.

        This is a separate step, so that users of the document do not wait for the disk.
        """
        document = self.document
        assert document is not None
        if self._copy is not None:
            try:
                self._copy.save(document)
            except Exception as exc:  # For example, JSON cannot hold a date of a TOML file.
                logger.error(
                    "The last good copy of the topology cannot be written (%s): this process could"
                    " not start while %s does not answer.", exc, self.source.describe(),
                )  # fmt: skip
        self.source.using(document.version)

    def _read_copy(self) -> Document | None:
        """The last good copy, if it is valid with today's settings; then it counts as in use."""
        if self._copy is None:
            return None
        try:
            document = self._copy.read()
            if document is not None:
                self._used = document, self._check(document, None)
        except Exception as exc:
            logger.warning("The last good copy in %s is of no use: %s", self._copy.path, exc)
            return None
        return document

    def _unavailable(self, exc: TopologyError) -> TopologyUnavailable:
        if self._copy is None:
            remedy = (
                "The option LAST_GOOD of TOPOLOGY names a file for a last good copy, with which a"
                " process starts all the same."
            )
        else:
            remedy = f"There is no last good copy in {str(self._copy.path)!r} either."
        return TopologyUnavailable(
            f"{str(exc).rstrip('.')}. {remedy} A first topology is put there by 'manage.py topology"
            " push FILE'."
        )


def refusal_of(exc: Exception) -> TopologyError:
    """``exc`` as a :exc:`TopologyError`.

    Any other exception comes from a document that was read or used. No document may end the thread
    that brings the next one.
    """
    if isinstance(exc, TopologyError):
        return exc
    return InvalidTopology([f"it cannot be used: {type(exc).__name__}: {exc}"])


def _problems(exc: TopologyError) -> tuple[str, ...]:
    return tuple(exc.problems) if isinstance(exc, InvalidTopology) else (str(exc),)
