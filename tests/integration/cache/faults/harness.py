"""Starts all parts of one run: servers, a workload, and clients that stop at given points."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from tests.integration.cache.faults.databases import WRITERS, database_at
from tests.integration.cache.faults.process_setup import ALBUMS, ITEMS, LANES, OWNERS, ProcessSetup
from tests.integration.cache.faults.readers import COUNTED, HITS
from tests.integration.cache.faults.servers import CacheServer
from tests.integration.cache.faults.staleness import Question, StalenessChecker, state
from tests.integration.cache.faults.stepped_client import SteppedClient
from tests.integration.cache.faults.workload import Workload
from tests.services.addresses import ServerAddress
from tests.services.proxy import Proxy

#: Seconds to wait for a cache server at most, and seconds to leave it alone afterwards.
TIMEOUT, BACKOFF = 0.1, 0.15
COMMIT_WITHIN, QUARANTINE = 0.2, 0.8
_SETTLES_IN = 30.0  # seconds


class FaultHarness(contextlib.ExitStack):
    """All parts of one run; ends them when it is closed.

    :param address: the database's server.
    :param caches: cache servers by alias; objects are in the first one, lists in the last one.
    :param ablation: name of the part that is missing from the protocol.
    """

    def __init__(
        self,
        address: ServerAddress,
        caches: dict[str, CacheServer],
        *,
        readers: int = 2,
        writers: int = 2,
        self_kill: int = 0,
        ablation: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._database, self.caches = database_at(address), list(caches.values())
        self.dice = random.Random(secrets.randbits(64))
        #: Clients reach the database through this proxy.
        self.proxy = self.enter_context(Proxy(address.host, address.port))
        user, password = WRITERS
        account = replace(address, user=user, password=password)
        aliases = list(caches)
        self.setup = ProcessSetup(
            address,
            account,
            {alias: server.entry for alias, server in caches.items()},
            {
                "OBJECTS": aliases[0], "LISTS": aliases[-1], "PREFIX": f"t{secrets.token_hex(3)}",
                "TIMEOUT": TIMEOUT, "BACKOFF": BACKOFF, "COMMIT_WITHIN": COMMIT_WITHIN, "QUARANTINE": QUARANTINE,
                **options,
            },
            ablation,
        )  # fmt: skip
        self._client_setup = replace(
            self.setup, writers=replace(account, host=self.proxy.host, port=self.proxy.port)
        )
        self.workload = Workload(self.setup, readers, writers, self_kill)
        self.callback(self.workload.close)
        self._clients: list[SteppedClient] = []
        self.callback(self._close_clients)
        self._prepare_clients()
        self._checker = StalenessChecker(address)
        self.callback(self._checker.close)
        self._began = time.monotonic()
        #: Reads and hits before the cache was warm.
        self._cold = (0, 0)
        #: Wrong answers that clients have got.
        self.stale_answers: list[str] = []
        #: Number of runs of each trouble, and number of processes that they killed.
        self.troubles: Counter[str] = Counter()
        self.kills = 0

    # ##### Clients #####

    def _prepare_clients(self, count: int = 3) -> None:
        while len(self._clients) < count:
            self._clients.append(SteppedClient(self._client_setup))

    def client(self) -> SteppedClient:
        """Return an idle client. The caller gives it back by :meth:`give_back` or kills it."""
        while True:
            self._prepare_clients()
            client = self._clients.pop(0)
            if client.lives:
                return client
            client.close()

    def new_client(self) -> SteppedClient:
        """Return the client that has done least, because it remembers little."""
        self._clients.reverse()
        return self.client()

    def give_back(self, client: SteppedClient) -> None:
        self._clients.insert(0, client)

    def kill(self, client: SteppedClient) -> None:
        client.close()
        self.kills += 1
        self._prepare_clients()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()

    # ##### Owners, rows and cache entries #####

    def items(self, owner: int, lane: int) -> list[int]:
        """Return the ids of the rows in a lane."""
        _, text = self._checker.truth(owner)[lane]
        return [line[0] for line in state(text)]

    def place(self) -> tuple[int, int]:
        """Return a random owner and a random lane."""
        return self.dice.choice(OWNERS), self.dice.choice(LANES)

    def work(self) -> str:
        """Return a kind of work that surely changes each kind of answer about a lane."""
        return self.dice.choice(["save", "update_lane", "bulk_update", "save"])

    def question(self, kind: str, owner: int, lane: int, item: int | None = None) -> Question:
        return Question(
            kind,
            owner,
            lane,
            self.dice.choice(ALBUMS),
            item or self.dice.choice(ITEMS[owner, lane]),
        )

    def evict(self, names: list[str], *, must_exist: bool = True) -> None:
        """Delete these names from all cache servers.

        :param must_exist: whether at least one of them must be there.
        """
        prefix = f"{self.setup.cache['PREFIX']}:faults."
        deleted = sum([cache.evict(names, prefix) for cache in self.caches])
        assert deleted or not must_exist, names

    def kill_session(self, number: int) -> None:
        """Have the database close a connection."""
        self._database.kill_session(number)

    # ##### The course of a run #####

    def warm(self, owner: int) -> None:
        """Return when the cache answers all readers that ask for rows of ``owner``."""
        self.workload.wait_for_rounds(owner, "hit_rounds", patience=_SETTLES_IN)

    def warm_up(self) -> None:
        """Return when the cache answers readers for all owners; called at the beginning."""
        for owner in OWNERS:
            self.warm(owner)
        self._cold = (self.workload.reads, self._hits)

    @property
    def _hits(self) -> int:
        return sum(map(self.workload.counted, HITS))

    @property
    def hit_ratio(self) -> float:
        """The share of hits in all reads since the cache was warm."""
        reads, hits = self._cold
        return (self._hits - hits) / max(self.workload.reads - reads, 1)

    def settle(self) -> None:
        """Stop the writers and return when the cache is used again for all rows.

        This proves that no marker and no quarantine stays for ever.
        """
        self.workload.stop_writers()
        for owner in OWNERS:
            self.warm(owner)

    @property
    def stale(self) -> list[str]:
        """All wrong answers, to readers of the workload or to clients."""
        return [*self.workload.stale, *self.stale_answers]

    def report(self) -> dict[str, Any]:
        workload = self.workload
        seconds = time.monotonic() - self._began
        counted = {field: workload.counted(field) for field in COUNTED}
        return {
            "reads": workload.reads,
            "reads/s": round(workload.reads / seconds),
            "hits": self._hits,
            "hits/reads": round(self.hit_ratio, 3),
            "bypasses": counted["bypasses"],
            "concurrent": workload.sum("reader", "changed"),
            "commits": workload.sum("writer", "commits"),
            "rollbacks": workload.sum("writer", "rollbacks"),
            "refused": workload.sum("writer", "refused"),
            "lost": workload.sum("writer", "lost"),
            "kills": self.kills + workload.kills,
            "repairs": counted["repairs"],
            "fills lost": counted["fills_lost"],
            "l1 hits": counted["l1_hits"],
            "broken": counted["broken"],
            "longest read (ms)": round(
                1000 * max(m.last.get("longest", 0.0) for m in workload.of("reader"))
            ),
            "stale": len(self.stale),
            "seconds": round(seconds, 1),
        }
