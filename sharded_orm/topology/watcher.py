"""Decides which topology document a process uses when its source delivers a new document.

A new document is used only if it is valid and may replace the document in use (for example, it must
contain all shards). Otherwise the new document is refused: the refusal is logged, and the process
continues to use the old document.
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
    """From where a process has loaded its topology."""

    SETTINGS = "settings"
    SOURCE = "source"
    LAST_GOOD = "last good copy"


@dataclass(frozen=True)
class TopologyStatus:
    """A report on the topology that a process uses: its version, origin and time of first use.

    If a newer document was refused, the report also contains the reasons.
    """

    version: int
    origin: Origin
    since: datetime
    #: The reasons why the newest document was refused or could not be read; empty if the newest
    #: document is in use.
    refused: tuple[str, ...] = ()


class TopologyWatcher(Generic[T]):
    """Holds the topology document that a process uses, and checks each document that could replace
    it.

    Not thread-safe: callers must hold a common lock.

    :param check: a function that computes the *value* of a document, for example the configuration
        that the process uses. Its arguments are the document and the value in use (None at the
        start). It raises :exc:`InvalidTopology` if the document must not be used.
    """

    def __init__(self, source: TopologySource, check: Callable[[Document, T | None], T]) -> None:
        self.source = source
        # The document in use, and the value that ``check`` has returned for it. Both are in one
        # attribute, and are replaced in one step, because a fork may happen at any moment: the
        # child must not get the value of another document.
        self._used: tuple[Document | None, T | None] = (None, None)
        self.status = TopologyStatus(0, Origin.SETTINGS, datetime.now(UTC))
        self._check = check
        self._refused: Document | None = None
        self._copy = None if source.last_good is None else LastGoodCopy(Path(source.last_good))

    @property
    def document(self) -> Document | None:
        """The topology document in use; None before :meth:`begin`."""
        return self._used[0]

    @property
    def value(self) -> T | None:
        """What the argument ``check`` of this class has returned for the document in use.

        None before :meth:`begin`.
        """
        return self._used[1]

    def of_child(self, source: TopologySource) -> TopologyWatcher[T]:
        """Return a new watcher for a forked child. It starts with the document in use.

        :param source: the child's own topology source.
        """
        child = TopologyWatcher(source, self._check)
        child._used = self._used
        assert child.document is not None
        # Take the version from the document and not from the parent's status. At the time of the
        # fork, another thread of the parent may have replaced the document, but not yet the status.
        child.status = replace(self.status, version=child.document.version)
        source.using(child.document.version)
        return child

    def begin(self) -> T:
        """Begin to use the source's document, and return the document's value (see :meth:`check`).

        If this document cannot be read, or is not valid, use the last good copy instead: a file in
        which the process saves each valid document.

        :raises TopologyUnavailable: neither the source's document nor the copy can be used.
        """
        copy = self._read_copy()
        document: Document | None = None
        try:
            document = self.source.load()
            if document is None:
                raise InvalidTopology(["nothing was pushed there yet"], self.source.describe())
            # If there is a last good copy, _read_copy() has checked it and put it in use. So here,
            # check() checks that the source's document may replace the copy. If both are the same
            # document, no check is needed.
            value = self.value if document == copy else self.check(document)
            changes = self._changes_to(document)
        except Exception as exc:
            refusal = refusal_of(exc)
            if copy is None:
                raise self._unavailable(refusal, is_read=document is not None) from exc
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
        """Check that ``document`` may replace the document in use.

        Return the *value* of the document: what the function ``check``, an argument of this class,
        returns.

        :raises InvalidTopology: the document must not be used; the message lists every reason.
        """
        if not self.source.allows_credentials and (problems := document.credentials()):
            raise InvalidTopology(problems)
        return self._check(document, self.value)

    def consider(self, document: Document | TopologyError, use: Callable[[T], None]) -> bool:
        """Use a document that the topology source has delivered, if it may be used.

        Return True if ``document`` has replaced the document in use, and False if it was in use
        already.

        :param document: the delivered document, or the error that was raised when it was read.
        :param use: a function that makes the process use the document. Its argument is what
            :meth:`check` returned for the document. If the function raises an exception, it must
            not have changed anything.
        :raises TopologyError: the document is refused, or ``document`` is an error. The reason is
            logged, unless the last refusal was the same.
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
            # Call use() after everything that may fail, because the process uses the document from
            # then on.
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
        """Return the changes from the document in use to ``document``, as a text for the log.

        The text is empty if ``document`` is in use already, or if no document is in use yet.
        """
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
        """Save the document in use as the last good copy, and inform the source which version is in use.

        Call this after :meth:`begin`, and after :meth:`consider` has returned True.
        :meth:`consider` does not call :meth:`keep`, so that a new document is used before the disk
        is written.
        """
        document = self.document
        assert document is not None
        if self._copy is not None:
            try:
                self._copy.save(document)
            # Catch every exception: the file may not be writable, or JSON may not be able to
            # represent the document, for example a date from a TOML file.
            except Exception as exc:
                logger.error(
                    "The last good copy of the topology cannot be written (%s): this process could"
                    " not start while %s does not answer.", exc, self.source.describe(),
                )  # fmt: skip
        self.source.using(document.version)

    def _read_copy(self) -> Document | None:
        """Read the last good copy, begin to use it, and return it.

        Return None if there is no copy, or if the copy is not valid together with the current
        settings.
        """
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

    def _unavailable(self, exc: TopologyError, *, is_read: bool) -> TopologyUnavailable:
        """Return the error of a process that cannot start.

        :param exc: the error because of which the source's document is not used.
        :param is_read: True if the source has a document, which was refused; False if it has none,
            or does not answer.
        """
        if is_read:
            # Do not tell the user to push a first topology, because the source has one already. If
            # the settings are wrong, pushing another topology would not help.
            remedy = (
                "Correct SHARDED_ORM in the settings, or the topology by 'manage.py topology push"
                " FILE'."
            )
        else:
            remedy = "A first topology is put there by 'manage.py topology push FILE'."
        if self._copy is None:
            copy = (
                "The option LAST_GOOD of TOPOLOGY names a file for a last good copy, with which a"
                " process starts all the same. "
            )
        elif self._copy.path.exists():
            copy = f"The last good copy in {str(self._copy.path)!r} cannot be used either. "
        else:
            copy = f"There is no last good copy in {str(self._copy.path)!r} either. "
        if is_read and self._copy is None:
            copy = ""  # A copy would be refused as well.
        return TopologyUnavailable(f"{str(exc).rstrip('.')}. {copy}{remedy}")


def refusal_of(exc: Exception) -> TopologyError:
    """Return ``exc`` itself if it is a :exc:`TopologyError`, and otherwise an error that describes
    it.

    So a document that causes an unexpected exception is refused like an invalid document, and the
    thread that delivers documents goes on.
    """
    if isinstance(exc, TopologyError):
        return exc
    return InvalidTopology([f"it cannot be used: {type(exc).__name__}: {exc}"])


def _problems(exc: TopologyError) -> tuple[str, ...]:
    return tuple(exc.problems) if isinstance(exc, InvalidTopology) else (str(exc),)
