"""A harness for interleavings: workers that stop at given points, a clock, and checks of reads.

A worker is a thread with connections of its own, or a forked process that can be killed. It stops
before or after it calls a method of a cache server, or after it has told all servers that COMMIT
comes next ("announce").
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections, transaction

from sharded_orm import runtime
from sharded_orm.cache import guards, markers
from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.models.cached import queryset
from sharded_orm.models.cached.cached_model import cached_model
from tests.cached.models import CachedAlbum, CachedPhoto
from tests.patience import PATIENCE

USER = 1
_METHODS = ("read", "lease", "fill", "mark", "finish", "add", "replace")


class Stale(AssertionError):
    """A read returned a state older than the one committed before the read began."""


class Clock:
    """Stands in for the module :mod:`time` in the modules of the protocol."""

    def __init__(self) -> None:
        self.offset = 0.0

    def advance(self, seconds: float) -> None:
        self.offset += seconds

    def time(self) -> float:
        return time.time() + self.offset

    def monotonic(self) -> float:
        return time.monotonic() + self.offset


class Point:
    """A point where a thread waits until it is released."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        assert self._go.wait(PATIENCE), "nobody let the worker go on"

    def wait(self) -> None:
        assert self._reached.wait(PATIENCE), "the worker did not come here"

    def release(self) -> None:
        self._go.set()


class WorkerThread:
    """A thread with connections of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as exc:  # any error is raised in the test's thread
            self._error = exc
        finally:
            connections.close_all()

    def join(self) -> Any:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the worker does not end"
        if self._error is not None:
            raise self._error
        return self._result


class WorkerProcess:
    """A forked process. It dies by SIGKILL, at a point or after its work."""

    def __init__(self, work: Callable[[WorkerProcess], Any]) -> None:
        hears, tells = os.pipe(), os.pipe()
        connections.close_all()
        self._pid = os.fork()
        # Each side keeps one end of each pipe, so that the death of one side is the end of file for
        # the other.
        if self._pid == 0:
            os.close(hears[0])
            os.close(tells[1])
            self._in, self._out = tells[0], hears[1]
            try:
                work(self)
            except Stale as exc:
                os.write(self._out, str(exc).encode())
                os._exit(1)
            except BaseException:  # the parent must get any error
                traceback.print_exc()
                os._exit(1)
            self.die()
        os.close(hears[1])
        os.close(tells[0])
        self._in, self._out = hears[0], tells[1]

    # Called in the forked process:

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Wait for the parent."""
        os.write(self._out, b".")
        assert os.read(self._in, 1), "the parent is gone"

    # Called in the parent:

    def wait(self) -> None:
        assert select.select([self._in], [], [], PATIENCE)[0], "the process does not come here"
        said = os.read(self._in, 1000).decode()
        assert said, "the process is gone"
        if said != ".":
            raise Stale(said)

    def release(self) -> None:
        os.write(self._out, b".")

    def join(self) -> None:
        """Return when the process was killed."""
        assert os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == -signal.SIGKILL
        os.close(self._in)
        os.close(self._out)


class InterleavingHarness:
    """Cache servers whose calls can be stopped, and the rows of one user."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.clock = Clock()
        self._rules: list[tuple[threading.Thread, str, str, Callable[[], Any]]] = []
        client = runtime.cache()
        assert client is not None
        self.cache = client
        # Each alias has objects of its own, even if two aliases name the same server.
        self.servers: Sequence[CacheServer] = tuple(
            dict.fromkeys((*client.object_servers, *client.list_servers))
        )
        #: In a process started by :meth:`begin_process`: that process.
        self.process: WorkerProcess | None = None
        self._pks: list[int] = []
        #: Names of the called methods, and the lines sent to guards.
        self.calls: list[str] = []
        self.lines: list[bytes] = []

    def install(self, monkeypatch: Any) -> None:
        """Install the points and the clock, after an ablation, which belongs inside of them."""
        for server in self.servers:
            for method in _METHODS:
                self._wrap(monkeypatch, server, method)
            if type(server).read_again is not CacheServer.read_again:  # That calls read().
                self._wrap(monkeypatch, server, "read_again", "read")
        monkeypatch.setattr(markers, "time", self.clock)
        announce = markers.TransactionMarkers.announce

        def announced(writes: Any) -> None:
            announce(writes)
            self._meet("announce", "after")

        monkeypatch.setattr(markers.TransactionMarkers, "announce", announced)
        announce_within = markers.TransactionMarkers.announce_within

        def announced_within(writes: Any, seconds: float) -> bool:
            is_in_time = announce_within(writes, seconds)
            if is_in_time:
                self._meet("announce", "after")
            return is_in_time

        monkeypatch.setattr(markers.TransactionMarkers, "announce_within", announced_within)
        self._use_clock()

    def _use_clock(self) -> None:
        # Another test has another cache, and so another reader; so has a forked process.
        reader = queryset.current_reader()
        assert reader is not None
        reader._now = self.clock.time
        reader.repairer._monotonic = self.clock.monotonic

    def _wrap(
        self, monkeypatch: Any, server: CacheServer, name: str, method: str | None = None
    ) -> None:
        """Install the points of a method.

        :param method: the method whose points these are (default: ``name``).
        """
        call = getattr(server, name)
        method = method or name

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(method)
            if method in ("mark", "finish"):
                self.lines += [line for _, line in args[method == "finish"]]
            if method == "fill" and not args[0]:
                return call(*args, **kwargs)
            replaced = self._meet(method, "instead")
            if replaced is not None:
                return replaced(call, *args, **kwargs)
            self._meet(method, "before")
            result = call(*args, **kwargs)
            self._meet(method, "after")
            return result

        monkeypatch.setattr(server, name, wrapped)

    def _meet(self, method: str, when: str) -> Any:
        here = threading.current_thread()
        for rule in self._rules:
            if rule[:3] == (here, method, when):
                if when == "instead":
                    return rule[3]
                self._rules.remove(rule)
                rule[3]()
                return None
        return None

    # Workers

    def begin(self, work: Callable[[], Any], *stops: tuple[str, str]) -> tuple[Any, ...]:
        """Start a thread. Return it and the points where it will stop."""
        worker = WorkerThread(work)
        points = [Point() for _ in stops]
        for (when, method), point in zip(stops, points, strict=True):
            self._rules.append((worker.thread, method, when, point))
        worker.thread.start()
        return worker, *points

    def begin_process(
        self,
        work: Callable[[], Any],
        *,
        die: tuple[str, str] | None = None,
        stop: tuple[str, str] | None = None,
    ) -> WorkerProcess:
        """Start a process that may stop at one point, and dies at another or after its work."""

        def run(process: WorkerProcess) -> None:
            self.process = process
            self._use_clock()
            if stop is not None:
                self.at(*stop, process.stop)
            if die is not None:
                self.at(*die, process.die)
            work()

        return WorkerProcess(run)

    def at(self, when: str, method: str, action: Callable[[], Any]) -> None:
        """Call ``action`` when this thread reaches a point."""
        self._rules.append((threading.current_thread(), method, when, action))

    def run_until_killed(self, work: Callable[[], Any], *, die: tuple[str, str]) -> None:
        """Run ``work`` in a process that is killed at a point, and return after that."""
        self.begin_process(work, die=die).join()

    @contextmanager
    def instead(self, method: str, action: Callable[..., Any]) -> Iterator[None]:
        """Call ``action(call, *args)`` instead of a method in this thread."""
        rule = (threading.current_thread(), method, "instead", action)
        self._rules.append(rule)
        try:
            yield
        finally:
            self._rules.remove(rule)

    # Rows

    def photos(self, number: int) -> list[int]:
        rows = [CachedPhoto(user_id=USER, title="old") for _ in range(number)]
        CachedPhoto.objects.bulk_create(rows)
        self._pks += [row.pk for row in rows]
        return [row.pk for row in rows]

    def photo(self, title: str = "old", album: int | None = None) -> int:
        pk: int = CachedPhoto.objects.create(user_id=USER, title=title, album_id=album).pk
        self._pks.append(pk)
        return pk

    def settle(self) -> None:
        """Create all guards, and advance the clock beyond their quarantine."""
        for server in self.servers:
            header = guards.header(self.clock.time())
            server.add([(name, header) for name in self.guards()], 3600)
        self.clock.advance(100)

    def evict(self, *objects: str, isolates: Sequence[int | None] = ()) -> None:
        """Delete all guards of the user's photos, and ``objects``, from the servers."""
        names = [*objects, *self.guards(*isolates)]
        for server in self.servers:
            type(server).finish(server, names, ())

    def delete_object(self, pk: int) -> None:
        """Delete an object from the servers, as an eviction would."""
        for server in self.servers:
            type(server).finish(server, [self.scope().object_name(str(pk))], ())
        # With the rows that this process remembers, a list is valid without its objects.
        reader = queryset.current_reader()
        assert reader is not None
        reader.memory._rows.clear()

    def forget_lists(self) -> None:
        """Make this process forget all lists that it has read."""
        reader = queryset.current_reader()
        assert reader is not None
        # In place: reads and fills of this process share the memory.
        reader.memory._lists.clear()
        reader.memory._revisions.clear()
        reader.memory._rows.clear()

    def guards(self, *isolates: int | None) -> list[str]:
        names = list(self.scope().guards)
        for isolate in isolates:
            names.append(self.scope(isolate).guards[-1])
        return names

    def scope(self, *isolate: int | None) -> Any:
        model = cached_model(CachedPhoto)
        assert model is not None
        key = model.key_token(USER)
        if not isolate:
            return model.scope(self.alias, key)
        return model.scope(self.alias, key, model.isolate_token(isolate[0]))

    def open_markers(self, *isolates: int | None) -> list[guards.Marker]:
        open_markers: list[guards.Marker] = []
        for server in self.servers:
            for raw in server.read(self.guards(*isolates))[0]:
                if raw is not None:
                    open_markers += guards.parse(raw).open
        return open_markers

    # Checks

    def observe(self, read: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the result of ``read``, and whether it queried the database."""
        statements: list[str] = []

        def note(execute: Any, sql: str, *args: Any) -> Any:
            statements.append(sql)
            return execute(sql, *args)

        with connections[self.alias].execute_wrapper(note):
            result = read()
        return result, any(CachedPhoto._meta.db_table in sql for sql in statements)

    def check(self, read: Callable[[], Any], expected: Any, times: int = 3) -> None:
        """Check that ``read`` returns the committed state, cached or not."""
        for _ in range(times):
            result = read()
            if result != expected:
                raise Stale(f"{result!r} was read, but {expected!r} is committed")

    def warm(self, *reads: Callable[[], Any]) -> None:
        """Return when all reads are answered from the cache, and this process keeps the rows of lists."""
        for read in reads:
            self.check_cached_again(read, read())
            # It uses the rows of a list of an isolate key when the guards were the same twice.
            for _ in range(3):
                read()

    def check_cached_again(self, read: Callable[[], Any], expected: Any) -> None:
        """Check that ``read`` returns the committed state and is cached again in the end."""
        for _ in range(20):
            result, was_asked = self.observe(read)
            if result != expected:
                raise Stale(f"{result!r} was read, but {expected!r} is committed")
            if not was_asked:
                return
            # Beyond a quarantine, the age of an old marker, and the time of a lease.
            self.clock.advance(20)
            self._drop_leases()
        counted = self.cache.statistics.counted(self.scope().type.name)
        raise AssertionError(f"it is not cached again: {counted}")

    def _drop_leases(self) -> None:
        """Delete leases of dead processes: they expire by the servers' clocks, not by ours."""
        for server in self.servers:
            with suppress(ServerDown):
                for pk in self._pks:
                    name = self.scope().object_name(str(pk))
                    (value,) = type(server).read(server, [name])[0]
                    # Redis stores a placeholder, memcached an empty value.
                    if value is None or value[:1] == b"\0":
                        type(server).finish(server, [name], ())


def title(pk: int) -> str:
    return str(CachedPhoto.objects.get(user_id=USER, photo_id=pk).title)


def titles(album: int | None) -> list[str]:
    photos = CachedPhoto.objects.filter(user_id=USER, album_id=album).order_by("photo_id")
    return [photo.title for photo in photos]


def all_titles() -> list[str]:
    return [p.title for p in CachedPhoto.objects.filter(user_id=USER).order_by("photo_id")]


def count(album: int | None) -> int:
    return CachedPhoto.objects.filter(user_id=USER, album_id=album).count()


class Writes:
    """How :func:`rename` and :func:`move` write."""

    by_save = False


def rename(pk: int, to: str = "new") -> None:
    _write(pk, title=to)


def move(pk: int, album: int | None) -> None:
    _write(pk, album_id=album)


def _write(pk: int, **values: Any) -> None:
    if not Writes.by_save:
        CachedPhoto.objects.filter(user_id=USER, photo_id=pk).update(**values)
        return
    photo = CachedPhoto.objects.uncached().get(user_id=USER, photo_id=pk)
    for name, value in values.items():
        setattr(photo, name, value)
    photo.save(update_fields=list(values))


def learn_saves() -> None:
    """Save each shape of :func:`rename` and :func:`move` twice, so that a plan of it is made."""
    with transaction.atomic(using="photos"):
        for album in (None, *CachedAlbum.objects.filter(user_id=USER).values_list("pk", flat=True)):
            photo = CachedPhoto.objects.create(user_id=USER, album_id=album)
            for _ in range(2):
                photo.save(update_fields=["title"])
                photo.save(update_fields=["album_id"])
                photo.save()
            photo.delete()
