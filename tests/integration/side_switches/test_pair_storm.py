"""Switches on two pairs while the operator, servers and the network fail, and writers go on writing."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.promotion.site import Writers
from tests.integration.side_switches.site import DURABLE, READ_ONLY, pair_of_servers
from tests.integration.side_switches.storm_site import FAULTS, SPANS, StormSite
from tests.services import ServiceMissing
from tests.services.proxy import Proxy
from tests.services.replication import MasterPair
from tests.services.server import HOST

# A connection that was refused, reset, or lost; and a server that is closed after its restart.
DEAD = frozenset({2002, 2003, 2006, 2013, 2026, READ_ONLY})


@pytest.fixture(scope="module")
def other_pair() -> Iterator[MasterPair]:
    try:
        with pair_of_servers(**DURABLE) as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def site(durable: MasterPair, other_pair: MasterPair, tmp_path: Path) -> Iterator[StormSite]:
    servers = [server for pair in (durable, other_pair) for server in (pair.first, pair.second)]
    with contextlib.ExitStack() as stack:
        proxies = {
            f"db{number}": stack.enter_context(Proxy(HOST, server.port))
            for number, server in enumerate(servers, 1)
        }
        site = StormSite(durable, tmp_path, other_pair=other_pair, proxies=proxies)
        site.create_databases()
        site.fence()
        yield site


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([*FAULTS, ""], id="short"),
        pytest.param(["", *FAULTS, "", ""] * 17, id="long", marks=pytest.mark.long),
    ],
)
def test_no_write_is_lost_whatever_fails(site: StormSite, faults: list[str]) -> None:
    chosen = random.Random(63)
    with site.writers(4) as writers, site.watched_pairs() as writable:
        for number, fault in enumerate(faults):
            span = SPANS[number % 2]
            side = f"db{1 + 2 * (number % 2) + (number // 2 + 1) % 2}"
            site.switch_under(fault, span, side, chosen)
            assert site.active()[2 * (number % 2)] == side
    site.wait_until_equal()
    rows = site.rows_on("db1", "db3")
    assert rows == site.rows_on("db2", "db4")
    acknowledged: list[int] = []
    for number in writers.numbers:
        acknowledged += [row for _, row in writers.acknowledged(number)]
        check_errors(writers, number)
    assert len(acknowledged) == len(set(acknowledged))
    assert set(acknowledged) <= rows
    assert "both" not in writable
    assert {"db1", "db2", "db3", "db4"} <= set(writable)
    print(f"{len(acknowledged)} writes; {Counter(writable)}")


def check_errors(writers: Writers, number: int) -> None:
    """Only dead servers may fail writes, and a switch those of transactions of several statements."""
    for _, code, text in writers.errors(number):
        is_switch = text.startswith("SideFenced ") and text.endswith("(in a transaction)")
        assert is_switch or code in DEAD, (code, text)
