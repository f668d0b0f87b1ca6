"""Cache servers of these tests, and the faults that they can have. Uses no part of the library."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from urllib.parse import unquote

import redis
from pymemcache.client.base import Client

from tests.integration.cache.faults.process_setup import ALBUMS, ALL_LANES, ITEMS, schema_of
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.redis import RedisServer
from tests.services.server import HOST

_JUNK = 1000


def guards_of(owner: int) -> list[str]:
    """Return how the names of the guards end that only reads of ``owner`` fetch."""
    stem = f"Item-{owner}" if owner else "Notice"
    narrow = [f"{stem}-{album}-revision" for album in ALBUMS]
    return [f"{stem}-revision", *narrow] if owner else narrow


def table_guards(owner: int) -> list[str]:
    """Return how the name of the guard of the owner's table ends."""
    return [f"Item-@{schema_of(owner)}-revision" if owner else "Notice-revision"]


def objects_of(owner: int) -> list[str]:
    """Return how the names of all possible objects of ``owner`` end."""
    stem = f"Item-{owner}" if owner else "Notice"
    return [f"{stem}-{item}" for lane in ALL_LANES for item in ITEMS[owner, lane]]


class CacheServer(ABC):
    """A private cache server."""

    #: Options for a server with little memory.
    small: ClassVar[dict[str, str]]

    def __init__(self, server: MemcachedServer | RedisServer) -> None:
        self.server = server

    @property
    def entry(self) -> dict[str, Any]:
        """An entry of ``CACHES``."""
        return self.server.django()

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all its entries."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Delete everything, as an administrator does."""

    def flood(self, dice: random.Random) -> None:
        """Store other entries, so that a small server has to evict some."""
        # Entries of all sizes, as memcached has separate memory for each size.
        for size in (60, 120, 250, 500, 1000, 2000):
            self._put({f"junk-{dice.getrandbits(40)}": b"x" * size for _ in range(_JUNK)})

    @abstractmethod
    def _put(self, junk: dict[str, bytes]) -> None: ...

    @property
    @abstractmethod
    def evictions(self) -> int:
        """The number of entries that the server has evicted by itself."""

    def prepare_restart(self) -> None:
        """Save what this kind of server should remember after a crash."""
        return

    @abstractmethod
    def evict(self, names: Iterable[str], prefix: str) -> int:
        """Delete names of the library and return how many existed.

        :param prefix: prefix of all names of the library.
        """

    def evict_some(self, dice: random.Random, share: float) -> None:
        self.delete(name for name in self.names() if dice.random() < share)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the server: new and open connections stay open, and nothing answers."""
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()

    def close(self) -> None:
        self.server.close()


class Memcached(CacheServer):
    small = {"m": "4"}

    def __init__(self, **options: str | None) -> None:
        super().__init__(MemcachedServer(**options))

    @contextlib.contextmanager
    def _client(self) -> Iterator[Client]:
        # A new client each time, as the server may have been restarted.
        client = Client((HOST, self.server.port), timeout=PATIENCE, connect_timeout=PATIENCE)
        try:
            yield client
        finally:
            client.close()

    def names(self) -> list[str]:
        # Without the client, which expects other ends of lines than this command sends.
        with (
            socket.create_connection((HOST, self.server.port), timeout=PATIENCE) as connection,
            connection.makefile("rwb") as stream,
        ):
            names: list[str] = []
            stream.write(b"lru_crawler metadump all\r\n")
            stream.flush()
            for line in stream:
                if line.startswith(b"key="):
                    names.append(unquote(line.split()[0].removeprefix(b"key=").decode()))
                elif line.startswith(b"BUSY"):  # the server is looking for expired entries
                    stream.write(b"lru_crawler metadump all\r\n")
                    stream.flush()
                else:
                    assert line == b"END\r\n", line
                    break
        return names

    def delete(self, names: Iterable[str]) -> None:
        with self._client() as client:
            client.delete_many(list(names), noreply=False)

    def evict(self, names: Iterable[str], prefix: str) -> int:
        # Without names(), which leaves out entries that are in use at the moment.
        with self._client() as client:
            return sum(client.delete(prefix + name, noreply=False) for name in names)

    def flush(self) -> None:
        with self._client() as client:
            client.flush_all(noreply=False)

    def _put(self, junk: dict[str, bytes]) -> None:
        with self._client() as client:
            client.set_many(junk, noreply=False)

    @property
    def evictions(self) -> int:
        with self._client() as client:
            return int(client.stats()[b"evictions"])


class Redis(CacheServer):
    # Evicts any key, a guard as soon as an object.
    small = {"maxmemory": "4mb", "maxmemory_policy": "allkeys-random"}

    def __init__(self, **options: str | None) -> None:
        super().__init__(RedisServer(**options))

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        client = redis.Redis(
            HOST, self.server.port, password=self.server.password, socket_timeout=PATIENCE
        )
        try:
            yield client
        finally:
            client.close()

    def names(self) -> list[str]:
        with self._client() as client:
            return [name.decode() for name in client.scan_iter(count=1000)]

    def delete(self, names: Iterable[str]) -> None:
        if existing := list(names):
            with self._client() as client:
                client.delete(*existing)

    def evict(self, names: Iterable[str], prefix: str) -> int:
        # A name may contain more about this server.
        patterns = [re.compile(rf"{re.escape(prefix + name)}(?![-\w])") for name in names]
        matching = [
            name for name in self.names() if any(pattern.search(name) for pattern in patterns)
        ]
        self.delete(matching)
        return len(matching)

    def flush(self) -> None:
        with self._client() as client:
            client.flushall()

    def _put(self, junk: dict[str, bytes]) -> None:
        with self._client() as client, client.pipeline(transaction=False) as pipeline:
            for name, value in junk.items():
                pipeline.set(name, value)
            pipeline.execute()

    @property
    def evictions(self) -> int:
        with self._client() as client:
            return int(client.info("stats")["evicted_keys"])

    def prepare_restart(self) -> None:
        # After a crash the server comes back with its entries of this moment, without later ones.
        with self._client() as client:
            client.save()
