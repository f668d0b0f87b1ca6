"""The setting as this process uses it: read once, then kept up to date with its source."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from django.conf import settings

from sharded_orm import conf
from sharded_orm.exceptions import (
    InvalidConfiguration,
    InvalidTopology,
    TopologyError,
    TopologyUnavailable,
)
from sharded_orm.routing.base import key_routing_of, make_strategy
from sharded_orm.topology import transitions
from sharded_orm.topology.aliases import GROUP_ENGINE
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology
from sharded_orm.topology.sources.base import TopologySource, make_source
from sharded_orm.topology.watcher import Origin, TopologyStatus, TopologyWatcher

logger = logging.getLogger("sharded_orm.topology")

# Seconds for which a topology that could not be had is not asked for again: a process asks
# several times while it starts, and each would wait.
_UNAVAILABLE_FOR = 10.0
_SETTINGS = TopologyStatus(0, Origin.SETTINGS, datetime.now(UTC))


class ActiveConfig:
    """The checked ``SHARDED_ORM`` with the topology of its source. Thread-safe.

    :param changed: called when :attr:`current` has become another one, with the lock held.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        #: What is in use; None until :meth:`load`. Read without the lock.
        self.current: conf.Config | None = None
        self.lock = threading.RLock()
        self._changed = changed
        # None for a source that never changes.
        self._follower: TopologyWatcher[conf.Config] | None = None
        # What a forked child has from its parent, until it asks for the first time.
        self._inherited: conf.Config | None = None
        # When no topology could be had, and why.
        self._unavailable: tuple[float, str] | None = None
        # While there is no follower: for commands that ask about the source itself.
        self._spare: TopologySource | None = None
        # The parents' sources: nothing here may finalise them, and speak on their connections.
        self._of_parents: list[TopologySource | None] = []

    def load(self) -> conf.Config:
        """:attr:`current`; read and followed from now on if that is not so yet.

        :raises InvalidConfiguration: the setting is wrong.
        :raises TopologyUnavailable: the source has no topology to give, nor has the disk.
        """
        with self.lock:
            if self.current is None:
                self.current = self._read() if self._inherited is None else self._inherit()
            return self.current

    def _read(self) -> conf.Config:
        if self._unavailable is not None and time.monotonic() < self._unavailable[0]:
            raise TopologyUnavailable(self._unavailable[1])
        source = _make_source()
        if not source.live:
            return conf.parse(conf.read())
        follower = TopologyWatcher(source, _checked)
        try:
            found = follower.begin()
        except TopologyUnavailable as exc:
            self._unavailable = time.monotonic() + _UNAVAILABLE_FOR, str(exc)
            source.stop()
            raise
        follower.keep()
        self._follow(follower)
        return found

    def _inherit(self) -> conf.Config:
        """In a forked child: what the parent used, and a source of its own."""
        assert self._follower is not None and self._inherited is not None
        self._of_parents.append(self._follower.source)
        self._inherited = None
        # Not by what was current: another thread of the parent may have been about to change it.
        follower = self._follower.of_child(_make_source())
        assert follower.value is not None
        self._follow(follower)
        return follower.value

    def _follow(self, follower: TopologyWatcher[conf.Config]) -> None:
        self._follower = follower

        def received(document: Document | TopologyError) -> None:
            with self.lock:
                if follower is self._follower:
                    try:
                        self._use(follower, document)
                    except TopologyError:
                        pass  # It is in the log.
                    except Exception:
                        # The thread of the source must live to bring the next one.
                        logger.exception(
                            "What %s brought was not taken.", follower.source.describe()
                        )

        follower.source.start(received)

    def _use(
        self, follower: TopologyWatcher[conf.Config], document: Document | TopologyError
    ) -> None:
        if follower.consider(document, self._begin_to_use):
            follower.keep()

    def _begin_to_use(self, new: conf.Config) -> None:
        before, self.current = self.current, new
        try:
            self._changed()
        except BaseException:
            # All of a change or nothing of it: who has looked meanwhile looks once more.
            self.current = before
            self._changed()
            raise

    # ##### What is asked about it #####

    def source(self) -> TopologySource:
        """The source; also while it has no topology to give."""
        with self.lock:
            with suppress(TopologyUnavailable):
                self.load()
            if self._follower is not None:
                return self._follower.source
            if self._spare is None:
                self._spare = _make_source()
            return self._spare

    def standing(self) -> TopologyStatus:
        """See ``runtime.standing``."""
        self.load()
        return _SETTINGS if self._follower is None else self._follower.standing

    def document(self) -> Document:
        """See ``runtime.document``."""
        self.load()
        found = self.source().load() if self._follower is None else self._follower.document
        assert found is not None
        return found

    def check(self, new: Document) -> conf.Config:
        """See ``runtime.check_document``."""
        with self.lock:
            try:
                before = self.load()
            except TopologyUnavailable:
                return TopologyWatcher(self.source(), _checked).check(new)
            if self._follower is not None:
                return self._follower.check(new)
            # In the settings it would stand in the place of what is there, without a version.
            version = max(new.version, before.topology.version + 1)
            return _checked(new.at_version(version), before)

    def refresh(self, at_least: int) -> None:
        """See ``runtime.refresh``."""
        self._unavailable = None
        self.load()
        follower = self._follower
        if follower is None or (at_least and follower.standing.version >= at_least):
            return
        before = follower.document
        found = follower.source.load()  # Not with the lock: it may take a while.
        with self.lock:
            if found is None or follower is not self._follower:
                return
            if follower.document is not before and follower.standing.version >= found.version:
                return  # The source's own thread has brought it, or a newer one, meanwhile.
            if not at_least or follower.standing.version < at_least:
                self._use(follower, found)

    # ##### Its end #####

    def reset(self) -> tuple[conf.Config | None, Callable[[], None]]:
        """Forget everything. What was in use, and what to call when no lock is held."""
        with self.lock:
            used = self.current or self._inherited
            sources = self._own_sources()
            self.current = self._inherited = self._unavailable = None
            self._follower = self._spare = None

        def stop() -> None:
            for source in sources:
                source.stop()

        return used, stop

    def end(self) -> None:
        """The process ends: others need not wait to see that."""
        for source in self._own_sources():
            source.stop()

    def _own_sources(self) -> list[TopologySource]:
        followed = self._follower.source if self._follower is not None else None
        if self._inherited is not None:
            self._of_parents.append(followed)
            followed = None
        return [source for source in (followed, self._spare) if source is not None]

    def forked(self) -> bool:
        """In the child, first of all. Whether it goes on with what its parent used.

        Another thread of the parent may have held the lock, and the threads of its source are
        not here.
        """
        self.lock = threading.RLock()
        self._unavailable = None
        self._of_parents.append(self._spare)
        self._spare = None
        if self.current is not None and self._follower is not None:
            self._inherited, self.current = self.current, None
        return self._inherited is not None


def _make_source() -> TopologySource:
    raw = conf.read()
    given = conf.source(raw)
    return make_source(given.source, given.options, raw)


def _checked(document: Document, before: conf.Config | None) -> conf.Config:
    """What ``document`` makes of the setting, if it may follow ``before``."""
    what = f"Version {document.version} of the topology, together with SHARDED_ORM,"
    try:
        made = conf.parse(conf.read(), document)
        _check_strategies(made.topology)
        found = (
            []
            if before is None
            else transitions.problems(before.topology, made.topology, key_routing_of)
        )
    except InvalidConfiguration as exc:
        raise InvalidTopology(exc.problems, what) from exc
    except Exception as exc:  # A strategy of somebody's own may raise anything.
        raise InvalidTopology([f"it cannot be used: {type(exc).__name__}: {exc}"], what) from exc
    if found:
        raise InvalidTopology(found, what)
    return made


def _check_strategies(checked: Topology) -> None:
    found: list[str] = []
    for group in checked.groups.values():
        try:
            make_strategy(group)
        except InvalidConfiguration as exc:
            found += exc.problems
        if dict.__contains__(settings.DATABASES, group.name):
            entry = dict.__getitem__(settings.DATABASES, group.name)
            if entry.get("ENGINE") != GROUP_ENGINE:
                found.append(
                    f"group {group.name!r} has the name of an entry of DATABASES; rename one"
                )
    if found:
        raise InvalidConfiguration(found)
