"""The configuration that this process uses.

The settings are read once. After that, only one part of the configuration changes: the topology
(the map of shards to nodes). It is replaced when the topology source, such as a file or ZooKeeper,
has a new one.
"""

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

# After the topology source has failed, it is not queried again for this many seconds. A starting
# process reads the configuration several times, and without this pause each read would wait for the
# source.
_UNAVAILABLE_FOR = 10.0
_SETTINGS = TopologyStatus(0, Origin.SETTINGS, datetime.now(UTC))


class ActiveConfig:
    """The configuration in use. It consists of the ``SHARDED_ORM`` setting, after its validation,
    and the topology in use.

    The topology (nodes and shard groups) comes from the setting itself or from a topology source,
    such as a file or ZooKeeper. Thread-safe.

    :param changed: a function that is called after :attr:`current` was replaced because of a new
        topology. :attr:`lock` is held during the call.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        #: The configuration in use; None until :meth:`load` is called. Code may read this attribute
        #: without holding the lock.
        self.current: conf.Config | None = None
        self.lock = threading.RLock()
        self._changed = changed
        # The object that watches the topology source (such as a file or ZooKeeper) for changes.
        # None before load() is called, or if the source never changes.
        self._watcher: TopologyWatcher[conf.Config] | None = None
        # The parent's configuration, in a forked child that has not called load() yet; otherwise
        # None.
        self._inherited: conf.Config | None = None
        # None, or a pair (time, error message) after the topology source (such as a file or
        # ZooKeeper) has failed. The source is not queried again before this time, which is a value
        # of time.monotonic().
        self._unavailable: tuple[float, str] | None = None
        # The topology source (such as a file or ZooKeeper) that source() returns as long as
        # _watcher is None. There is no watcher if the source never changes. There is also none if
        # load() has failed because the source does not answer or has no topology yet.
        self._unwatched_source: TopologySource | None = None
        # The topology sources (such as connections to ZooKeeper) that a forked child has inherited
        # from its parent processes. The child keeps references to them, because Python would
        # otherwise finalise them, and so write to the connections of the parents.
        self._sources_of_parents: list[TopologySource | None] = []

    def load(self) -> conf.Config:
        """Return the configuration in use.

        The first call reads the setting and the topology, and begins to watch the topology source
        for changes.

        :raises InvalidConfiguration: the setting is wrong.
        :raises TopologyUnavailable: the source does not answer or has no valid topology, and there is
            no local copy of an earlier one (the last good copy).
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
        """In a forked child, take over the parent's configuration.

        Open a new topology source and watch it, because the threads of the parent's source do not
        run in the child.
        """
        assert self._watcher is not None and self._inherited is not None
        self._sources_of_parents.append(self._watcher.source)
        self._inherited = None
        # Take the configuration from the parent's watcher, because self.current may be wrong. At
        # the moment of the fork, another thread of the parent may have been replacing it.
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
                        # The watcher has refused the new topology and logged the error, so do
                        # nothing here.
                        pass
                    except Exception:
                        # Catch every error, because an error that leaves this function would end
                        # the thread of the topology source.
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
            # self._changed() has failed for the new configuration, so restore the old one. Other
            # threads may have used the new one meanwhile. So call self._changed() once more, so
            # that everything follows the old configuration.
            self.current = before
            self._changed()
            raise

    # ##### Questions about the topology #####

    def source(self) -> TopologySource:
        """Return the topology source (such as a file or ZooKeeper), even if it has no topology or
        does not answer.
        """
        with self.lock:
            with suppress(TopologyUnavailable):
                self.load()
            if self._watcher is not None:
                return self._watcher.source
            if self._unwatched_source is None:
                self._unwatched_source = _make_source()
            return self._unwatched_source

    def status(self) -> TopologyStatus:
        """Return which topology is in use and, if a newer one was refused, why.

        See ``runtime.topology_status``.
        """
        self.load()
        return _SETTINGS if self._watcher is None else self._watcher.status

    def document(self) -> Document:
        """Return the topology in use as a document. See ``runtime.document``."""
        self.load()
        document = self.source().load() if self._watcher is None else self._watcher.document
        assert document is not None
        return document

    def check(self, new: Document) -> conf.Config:
        """Return the configuration that would result from the topology document ``new``.

        See ``runtime.check_document``.
        """
        with self.lock:
            try:
                before = self.load()
            except TopologyUnavailable:
                return TopologyWatcher(self.source(), _checked).check(new)
            if self._watcher is not None:
                return self._watcher.check(new)
            # A static source, that is, the settings, gives the topology no version. So give ``new``
            # a later version than the topology in use has. Otherwise the check would refuse ``new``
            # because of its version, and would not tell whether its content is right.
            version = max(new.version, before.topology.version + 1)
            return _checked(new.at_version(version), before)

    def refresh(self, at_least: int) -> None:
        """Load the topology document from the source and use it from now on.

        See ``runtime.refresh``.
        """
        self._unavailable = None
        self.load()
        watcher = self._watcher
        if watcher is None or (at_least and watcher.status.version >= at_least):
            return
        before = watcher.document
        # Load the document without holding the lock, because the source may answer slowly.
        document = watcher.source.load()
        with self.lock:
            if document is None or watcher is not self._watcher:
                return
            if watcher.document is not before and watcher.status.version >= document.version:
                # While this method was loading, the thread of the topology source has received the
                # same document or a newer one, and uses it already.
                return
            if not at_least or watcher.status.version < at_least:
                self._consider(watcher, document)

    # ##### Reset, exit and fork #####

    def reset(self) -> tuple[conf.Config | None, Callable[[], None]]:
        """Forget the configuration. The next :meth:`load` reads the setting again.

        :return: the configuration that was in use (None if nothing was loaded), and a function that
            stops the topology sources. Call the function without holding a lock, because it waits
            for the sources' threads.
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
        """Stop the topology sources (such as a watched file, or ZooKeeper) when this process exits.

        A source such as ZooKeeper then reports at once to other processes that this process has ended.
        """
        for source in self._own_sources():
            source.stop()

    def _own_sources(self) -> list[TopologySource]:
        watched = self._watcher.source if self._watcher is not None else None
        if self._inherited is not None:
            self._sources_of_parents.append(watched)
            watched = None
        return [source for source in (watched, self._unwatched_source) if source is not None]

    def after_fork(self) -> bool:
        """Prepare the object for use in a forked child.

        Call this before any other method, for two reasons. At the fork, another thread of the
        parent may have held the lock. And the threads of the parent's topology source do not run in
        the child.

        :return: True if the next :meth:`load` takes over the parent's configuration and opens a new
            source. False if the parent had no configuration yet, or its source is static.
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
    """Return the configuration that results from the topology ``document`` and the ``SHARDED_ORM``
    setting.

    :param before: the configuration in use; None if there is none yet. The new topology is refused
        if it must not replace the topology in use, for example because it lacks a shard.
    :raises InvalidTopology: the result is not valid, or must not replace ``before``. The error
        lists every problem.
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
    except Exception as exc:
        # Catch every error, because the check also calls strategy classes of the project, which may
        # raise any error.
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
