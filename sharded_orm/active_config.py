"""The setting that this process uses: read once, then kept up to date with its topology source."""

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

# After a failure the source is not asked again for so many seconds: a starting process asks several
# times, and each time would wait.
_UNAVAILABLE_FOR = 10.0
_SETTINGS = TopologyStatus(0, Origin.SETTINGS, datetime.now(UTC))


class ActiveConfig:
    """The checked ``SHARDED_ORM`` with the topology of its source. Thread-safe.

    :param changed: called with the lock held, whenever :attr:`current` has been replaced.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        #: The configuration in use; None until :meth:`load`. May be read without the lock.
        self.current: conf.Config | None = None
        self.lock = threading.RLock()
        self._changed = changed
        # None if the source never changes.
        self._watcher: TopologyWatcher[conf.Config] | None = None
        # In a forked child: the configuration of the parent, until the child first asks.
        self._inherited: conf.Config | None = None
        # Until when the source is not asked again, and why.
        self._unavailable: tuple[float, str] | None = None
        # While there is no watcher: for commands that ask about the source itself.
        self._unwatched_source: TopologySource | None = None
        # The parents' sources, kept so that nothing finalises them and writes to their connections.
        self._sources_of_parents: list[TopologySource | None] = []

    def load(self) -> conf.Config:
        """Return :attr:`current`; at first, read it and watch the source from now on.

        :raises InvalidConfiguration: the setting is wrong.
        :raises TopologyUnavailable: neither the source nor the last good copy has a topology.
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
        watcher = TopologyWatcher(source, _checked)
        try:
            config = watcher.begin()
        except TopologyUnavailable as exc:
            self._unavailable = time.monotonic() + _UNAVAILABLE_FOR, str(exc)
            source.stop()
            raise
        watcher.keep()
        self._watch(watcher)
        return config

    def _inherit(self) -> conf.Config:
        """In a forked child: the configuration of the parent, and a source of the child's own."""
        assert self._watcher is not None and self._inherited is not None
        self._sources_of_parents.append(self._watcher.source)
        self._inherited = None
        # The watcher's, not the current one: a thread of the parent may have been changing that.
        watcher = self._watcher.of_child(_make_source())
        assert watcher.value is not None
        self._watch(watcher)
        return watcher.value

    def _watch(self, watcher: TopologyWatcher[conf.Config]) -> None:
        self._watcher = watcher

        def received(document: Document | TopologyError) -> None:
            with self.lock:
                if watcher is self._watcher:
                    try:
                        self._consider(watcher, document)
                    except TopologyError:
                        pass  # It is in the log.
                    except Exception:
                        # The source's thread must survive to bring the next document.
                        logger.exception(
                            "What %s brought was not taken.", watcher.source.describe()
                        )

        watcher.source.start(received)

    def _consider(
        self, watcher: TopologyWatcher[conf.Config], document: Document | TopologyError
    ) -> None:
        if watcher.consider(document, self._use):
            watcher.keep()

    def _use(self, new: conf.Config) -> None:
        before, self.current = self.current, new
        try:
            self._changed()
        except BaseException:
            # A change takes effect as a whole or not at all: readers must read again.
            self.current = before
            self._changed()
            raise

    # ##### Questions about the topology #####

    def source(self) -> TopologySource:
        """The source, even if it has no topology to give."""
        with self.lock:
            with suppress(TopologyUnavailable):
                self.load()
            if self._watcher is not None:
                return self._watcher.source
            if self._unwatched_source is None:
                self._unwatched_source = _make_source()
            return self._unwatched_source

    def status(self) -> TopologyStatus:
        """See ``runtime.topology_status``."""
        self.load()
        return _SETTINGS if self._watcher is None else self._watcher.status

    def document(self) -> Document:
        """See ``runtime.document``."""
        self.load()
        document = self.source().load() if self._watcher is None else self._watcher.document
        assert document is not None
        return document

    def check(self, new: Document) -> conf.Config:
        """See ``runtime.check_document``."""
        with self.lock:
            try:
                before = self.load()
            except TopologyUnavailable:
                return TopologyWatcher(self.source(), _checked).check(new)
            if self._watcher is not None:
                return self._watcher.check(new)
            # The document would replace the ranges in the settings, which have no version.
            version = max(new.version, before.topology.version + 1)
            return _checked(new.at_version(version), before)

    def refresh(self, at_least: int) -> None:
        """See ``runtime.refresh``."""
        self._unavailable = None
        self.load()
        watcher = self._watcher
        if watcher is None or (at_least and watcher.status.version >= at_least):
            return
        before = watcher.document
        document = watcher.source.load()  # Without the lock: it may take a while.
        with self.lock:
            if document is None or watcher is not self._watcher:
                return
            if watcher.document is not before and watcher.status.version >= document.version:
                return  # The source's thread has brought this or a newer document meanwhile.
            if not at_least or watcher.status.version < at_least:
                self._consider(watcher, document)

    # ##### The end #####

    def reset(self) -> tuple[conf.Config | None, Callable[[], None]]:
        """Forget everything. Return the configuration that was in use, and a function.

        The function stops the sources. Call it without holding a lock: it waits for their threads.
        """
        with self.lock:
            used = self.current or self._inherited
            sources = self._own_sources()
            self.current = self._inherited = self._unavailable = None
            self._watcher = self._unwatched_source = None

        def stop_sources() -> None:
            for source in sources:
                source.stop()

        return used, stop_sources

    def stop(self) -> None:
        """Stop the sources as the process ends, so that other processes see the end at once."""
        for source in self._own_sources():
            source.stop()

    def _own_sources(self) -> list[TopologySource]:
        watched = self._watcher.source if self._watcher is not None else None
        if self._inherited is not None:
            self._sources_of_parents.append(watched)
            watched = None
        return [source for source in (watched, self._unwatched_source) if source is not None]

    def after_fork(self) -> bool:
        """Prepare a forked child. Whether it goes on with the configuration of its parent.

        Call this before anything else: another thread of the parent may have held the lock, and
        the threads of the parent's source do not run in the child.
        """
        self.lock = threading.RLock()
        self._unavailable = None
        self._sources_of_parents.append(self._unwatched_source)
        self._unwatched_source = None
        if self.current is not None and self._watcher is not None:
            self._inherited, self.current = self.current, None
        return self._inherited is not None


def _make_source() -> TopologySource:
    raw = conf.read()
    options = conf.source(raw)
    return make_source(options.source, options.options, raw)


def _checked(document: Document, before: conf.Config | None) -> conf.Config:
    """The setting with ``document`` laid over it, if that may follow ``before``.

    :raises InvalidTopology: it may not; lists everything that is wrong.
    """
    what = f"Version {document.version} of the topology, together with SHARDED_ORM,"
    try:
        config = conf.parse(conf.read(), document)
        _check_strategies(config.topology)
        problems = (
            []
            if before is None
            else transitions.problems(before.topology, config.topology, key_routing_of)
        )
    except InvalidConfiguration as exc:
        raise InvalidTopology(exc.problems, what) from exc
    except Exception as exc:  # A strategy of the project may raise anything.
        raise InvalidTopology([f"it cannot be used: {type(exc).__name__}: {exc}"], what) from exc
    if problems:
        raise InvalidTopology(problems, what)
    return config


def _check_strategies(topology: Topology) -> None:
    problems: list[str] = []
    for group in topology.groups.values():
        try:
            make_strategy(group)
        except InvalidConfiguration as exc:
            problems += exc.problems
        if dict.__contains__(settings.DATABASES, group.name):
            entry = dict.__getitem__(settings.DATABASES, group.name)
            if entry.get("ENGINE") != GROUP_ENGINE:
                problems.append(
                    f"group {group.name!r} has the name of an entry of DATABASES; rename one"
                )
    if problems:
        raise InvalidConfiguration(problems)
