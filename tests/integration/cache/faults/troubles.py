"""Faults and bad moments; each runs from its beginning until readers use the recovered state.

Every trouble can be applied to the real protocol, which survives it, and to an ablation, which
does not: readers that know nothing of the trouble find stale answers. Where the moment matters, a
writer stops there, and goes on (or dies) after the readers have read the owner's rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tests.integration.cache.faults.harness import COMMIT_WITHIN, QUARANTINE, TIMEOUT, FaultHarness
from tests.integration.cache.faults.process_setup import ALBUMS
from tests.integration.cache.faults.servers import guards_of, objects_of, table_guards
from tests.integration.cache.faults.staleness import Question
from tests.integration.cache.faults.stepped_client import SteppedClient
from tests.patience import PATIENCE

Trouble = Callable[[FaultHarness], None]
_ATTEMPTS = 20


def stopped(
    harness: FaultHarness, owner: int, lane: int, *stops: str, work: str | None = None
) -> SteppedClient:
    """Return a writer in the middle of a transaction, at the first of ``stops``."""
    writer = harness.client()
    for _ in range(_ATTEMPTS):
        if writer.write(owner, lane, work or harness.work(), *stops):
            return writer
        # Refused because a cache server was down a moment ago, or ended by a deadlock.
        harness.workload.wait_for_rounds(owner)
    raise AssertionError(f"no transaction comes to {stops[0]!r}; the last one: {writer.result!r}")


def complete(harness: FaultHarness, owner: int, lane: int, work: str | None = None) -> None:
    """Run one transaction from begin to end."""
    writer = harness.client()
    for _ in range(_ATTEMPTS):
        writer.write(owner, lane, work or harness.work())
        if writer.result == "commits":
            return harness.give_back(writer)
        harness.workload.wait_for_rounds(owner)
    raise AssertionError(f"no transaction is committed; the last one: {writer.result!r}")


# ##### No faults, only bad moments #####


def late_fill(harness: FaultHarness) -> None:
    """A reader has read a row, and stores it after the row was changed."""
    owner, lane = harness.place()
    reader = harness.client()
    harness.warm(owner)
    for _ in range(_ATTEMPTS):
        # Nobody else may store the row first.
        with harness.workload.no_reads_of(owner):
            complete(harness, owner, lane, "create")
            complete(harness, owner, lane, "update_lane")
            item = harness.dice.choice(harness.items(owner, lane))
            if reader.read(harness.question("get", owner, lane, item), "filling"):
                complete(harness, owner, lane, "update_lane")
                reader.finish()
                record_stale(harness, reader)
                break
        record_stale(harness, reader)
    else:
        raise AssertionError("no read stores anything")
    harness.give_back(reader)
    harness.workload.wait_for_rounds(owner)


def plain_write(harness: FaultHarness) -> None:
    owner, lane = harness.place()
    harness.warm(owner)
    harness.workload.wait_for_rounds(owner, rounds=6)
    complete(harness, owner, lane, "save")
    harness.workload.wait_for_rounds(owner, rounds=6)


def torn_list(harness: FaultHarness) -> None:
    """Rows change between the packets in which a reader fetches a list and its rows."""
    owner, lane = harness.place()
    # A reader that does not know yet which rows exist.
    reader, helper = harness.new_client(), harness.client()
    harness.warm(owner)
    with harness.workload.no_reads_of(owner):
        for kind in ("list", "album", "lane"):
            question = harness.question(kind, owner, lane)
            complete(harness, owner, lane, "create_many")
            store(harness, helper, question)
            # The reader stops between its first packet and the second one.
            if reader.read(question, "reading", "reading") and reader.go_on():
                complete(harness, owner, lane, "save_all")
                store(harness, helper, question)
                reader.finish()
            record_stale(harness, reader)
    harness.give_back(reader)
    harness.give_back(helper)
    harness.workload.wait_for_rounds(owner)


def store(harness: FaultHarness, reader: SteppedClient, question: Question) -> None:
    """Fill the cache with the answer to ``question`` and with all rows of its lane."""
    for album in ALBUMS:
        reader.read(replace(question, kind="album", album=album))
        record_stale(harness, reader)
    reader.read(question)
    record_stale(harness, reader)


def record_stale(harness: FaultHarness, reader: SteppedClient) -> None:
    harness.stale_answers += [reader.result] if reader.result is not None else []


def two_writers(harness: FaultHarness) -> None:
    """One writer closes its markers while another is about to commit, and dies afterwards."""
    owner, lane = harness.place()
    harness.warm(owner)
    first = stopped(harness, owner, lane, "closing")
    second = stopped(harness, owner, lane, "committing", "closing")
    first.finish()
    harness.give_back(first)
    harness.workload.wait_for_rounds(owner, rounds=3)
    second.go_on()
    harness.workload.wait_for_rounds(owner)
    harness.kill(second)
    harness.workload.wait_for_rounds(owner, rounds=3)


def slow_commit(harness: FaultHarness) -> None:
    """A writer stays about to commit for so long that its marker counts as old."""
    owner, lane = harness.place()
    writer = stopped(harness, owner, lane, "committing", "closing")
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        harness.workload.wait_for_rounds(owner)
    harness.workload.wait_for_rounds(owner, rounds=6)
    writer.go_on()
    harness.kill(writer)
    harness.workload.wait_for_rounds(owner, rounds=6)


def rollback(harness: FaultHarness) -> None:
    owner, lane = harness.place()
    writer = harness.client()
    writer.write(owner, lane, harness.work(), keep=False)
    harness.give_back(writer)
    harness.workload.wait_for_rounds(owner)


# ##### Writers that are killed #####


def dies_at(point: str) -> Trouble:
    def trouble(harness: FaultHarness) -> None:
        owner, lane = harness.place()
        writer = stopped(harness, owner, lane, point)
        harness.workload.wait_for_rounds(owner)
        harness.kill(writer)
        harness.workload.wait_for_rounds(owner)

    trouble.__name__ = f"dies_at_{point}"
    return trouble


def dies_with_commit(harness: FaultHarness) -> None:
    """A writer dies after it has sent COMMIT, before the answer."""
    owner, lane = harness.place()
    writer = stopped(harness, owner, lane, "committing")
    harness.workload.wait_for_rounds(owner)
    writer.commit_and_die()
    harness.kill(writer)
    harness.workload.wait_for_rounds(owner)


def dies_at_any_time(harness: FaultHarness) -> None:
    harness.workload.kill_a_writer(harness.dice.randrange(100))
    harness.workload.wait_for_rounds(harness.place()[0])


# ##### The cache server does not answer #####


def pause(harness: FaultHarness) -> None:
    owner, _ = harness.place()
    cache = harness.dice.choice(harness.caches)
    end = time.monotonic() + 4 * TIMEOUT
    with cache.paused():
        while time.monotonic() < end:
            harness.workload.wait_for_rounds(owner)
    harness.workload.wait_for_rounds(owner)


def pause_at(point: str) -> Trouble:
    """A cache server stops answering when a writer is at the point; it gets the packets later."""

    def trouble(harness: FaultHarness) -> None:
        owner, lane = harness.place()
        writer = stopped(harness, owner, lane, point)
        harness.workload.wait_for_rounds(owner)
        cache = harness.dice.choice(harness.caches)
        with cache.paused():
            writer.finish()
            harness.workload.wait_for_rounds(owner)
        harness.workload.wait_for_rounds(owner)
        harness.give_back(writer)
        # The next transaction sends the remaining packets.
        complete(harness, owner, lane)
        harness.workload.wait_for_rounds(owner)

    trouble.__name__ = f"pause_at_{point}"
    return trouble


def pause_and_die(harness: FaultHarness) -> None:
    """A cache server stops answering after a writer's commit, and the writer dies meanwhile."""
    owner, lane = harness.place()
    writer = stopped(harness, owner, lane, "closing")
    with harness.dice.choice(harness.caches).paused():
        writer.finish()
        harness.kill(writer)
        harness.workload.wait_for_rounds(owner)
    harness.workload.wait_for_rounds(owner)


# ##### The cache server loses data #####


def evict_some(harness: FaultHarness) -> None:
    harness.warm(harness.place()[0])
    for cache in harness.caches:
        cache.evict_some(harness.dice, 0.3)
    harness.workload.wait_for_rounds(harness.place()[0])


def evict_guards(harness: FaultHarness) -> None:
    owner, _ = harness.place()
    harness.warm(owner)
    _evict_guards(harness, owner)
    harness.workload.wait_for_rounds(owner)


def _evict_guards(harness: FaultHarness, owner: int) -> None:
    harness.evict(harness.dice.choice((guards_of, guards_of, table_guards))(owner))


def evict_again(harness: FaultHarness) -> None:
    """A guard is lost, is used, and is lost again."""
    owner, lane = harness.place()
    harness.warm(owner)
    evict_all_guards(harness, owner)
    harness.warm(owner)
    harness.workload.wait_for_rounds(owner, rounds=6)
    complete(harness, owner, lane, "save")
    evict_all_guards(harness, owner)
    harness.workload.wait_for_rounds(owner, rounds=6)


def flush(harness: FaultHarness) -> None:
    harness.warm(harness.place()[0])
    for cache in harness.caches:
        cache.flush()
    harness.workload.wait_for_rounds(harness.place()[0])


def flood(harness: FaultHarness) -> None:
    harness.warm(harness.place()[0])
    for cache in harness.caches:
        cache.flood(harness.dice)
    harness.workload.wait_for_rounds(harness.place()[0])


def restart(harness: FaultHarness) -> None:
    """A cache server is killed and comes back; the data that it has kept lacks a write."""
    owner, lane = harness.place()
    harness.warm(owner)
    cache = harness.dice.choice(harness.caches)
    cache.prepare_restart()
    complete(harness, owner, lane)
    cache.server.kill()
    cache.server.start()
    harness.workload.wait_for_rounds(owner, rounds=6)


def restart_at(point: str) -> Trouble:
    """A cache server crashes and comes back while a writer is at the point, who then dies."""

    def trouble(harness: FaultHarness) -> None:
        owner, lane = harness.place()

        def restart() -> float:
            cache.server.kill()
            began = time.monotonic()
            cache.server.start()
            return began

        harness.warm(owner)
        cache = harness.dice.choice(harness.caches)
        cache.prepare_restart()
        if point == "committing":
            commit_without_markers(harness, owner, lane, restart, rounds=1)
        else:
            writer = stopped(harness, owner, lane, point)
            restart()
            harness.workload.wait_for_rounds(owner)
            harness.kill(writer)
        harness.workload.wait_for_rounds(owner)

    trouble.__name__ = f"restart_at_{point}"
    return trouble


def commit_without_markers(
    harness: FaultHarness, owner: int, lane: int, lose: Callable[[], float], rounds: int
) -> None:
    """The markers are lost between mark and COMMIT; readers read; the writer commits and dies.

    :param lose: removes the markers, and returns a moment before it has removed the first one.
    :param rounds: how many rounds of reads come before the COMMIT.
    """
    give_up = time.monotonic() + PATIENCE
    while True:
        writer = stopped(harness, owner, lane, "committing", "closing")
        began = lose()
        harness.workload.wait_for_rounds(owner, rounds=rounds)
        if time.monotonic() - began < QUARANTINE - COMMIT_WITHIN:
            break
        # On a busy machine this took longer than the protocol promises to survive.
        harness.kill(writer)
        assert time.monotonic() < give_up, "the readers were never fast enough"
    writer.go_on()
    harness.workload.wait_for_rounds(owner)
    harness.kill(writer)


def lost_marker(how: Callable[[FaultHarness, int], None]) -> Trouble:
    """The guard is lost between mark and COMMIT."""

    def trouble(harness: FaultHarness) -> None:
        owner, lane = harness.place()

        def lose() -> float:
            began = time.monotonic()
            how(harness, owner)
            return began

        harness.warm(owner)
        # The first round creates new guards, the second one finds them without markers.
        commit_without_markers(harness, owner, lane, lose, rounds=6)
        harness.workload.wait_for_rounds(owner, rounds=6)

    trouble.__name__ = f"lost_marker_{how.__name__.strip('_')}"
    return trouble


def evict_all_guards(harness: FaultHarness, owner: int) -> None:
    harness.evict([*guards_of(owner), *table_guards(owner)])


def flush_all(harness: FaultHarness, owner: int) -> None:
    for cache in harness.caches:
        cache.flush()


def dies_and_guard_is_lost(harness: FaultHarness) -> None:
    """A writer dies before it deletes its objects, and the guard is lost with its marker."""
    owner, lane = harness.place()
    # New guards without markers, and objects that are stored under them.
    evict_all_guards(harness, owner)
    fills_from = time.monotonic() + QUARANTINE
    while time.monotonic() < fills_from:
        harness.workload.wait_for_rounds(owner)
    # Also the leases of readers that were not allowed to store anything, if they still hold any.
    harness.evict(objects_of(owner), must_exist=False)
    harness.workload.wait_for_rounds(owner, rounds=6)
    writer = stopped(harness, owner, lane, "closing", work="save_all")
    harness.kill(writer)
    evict_all_guards(harness, owner)
    harness.workload.wait_for_rounds(owner, rounds=6)


# ##### The database does not answer #####


def session_is_killed(harness: FaultHarness) -> None:
    owner, lane = harness.place()
    writer = stopped(harness, owner, lane, "committing")
    harness.workload.wait_for_rounds(owner)
    harness.kill_session(writer.session)
    writer.finish()
    harness.give_back(writer)
    harness.workload.wait_for_rounds(owner)


def connection_is_cut(harness: FaultHarness) -> None:
    owner, lane = harness.place()
    writer = stopped(harness, owner, lane, "committing")
    harness.workload.wait_for_rounds(owner)
    harness.proxy.cut()
    writer.finish()
    harness.workload.wait_for_rounds(owner)
    harness.proxy.forward()
    harness.give_back(writer)
    harness.workload.wait_for_rounds(owner)


def answer_is_lost(harness: FaultHarness) -> None:
    """COMMIT arrives and is executed, but its answer is lost."""
    owner, lane = harness.place()
    writer = stopped(harness, owner, lane, "committing")
    harness.workload.wait_for_rounds(owner)
    harness.proxy.drop_answers()
    writer.finish()
    harness.workload.wait_for_rounds(owner)
    harness.proxy.forward()
    harness.give_back(writer)
    harness.workload.wait_for_rounds(owner)


#: The troubles of each mode.
MODES: dict[str, tuple[Trouble, ...]] = {
    "normal": (plain_write, late_fill, torn_list, two_writers, rollback, slow_commit),
    "kills": (
        dies_at("marking"), dies_at("committing"), dies_with_commit, dies_at("closing"), dies_at("half"),
        dies_at_any_time,
    ),
    "stopped cache": (pause, pause_at("marking"), pause_at("committing"), pause_at("closing"), pause_and_die),
    "evictions": (evict_some, evict_guards, evict_again, flush, flood, dies_and_guard_is_lost),
    "restarts": (restart, restart_at("committing"), restart_at("closing")),
    "lost connections": (session_is_killed, connection_is_cut, answer_is_lost),
    "lost markers": (lost_marker(evict_all_guards), lost_marker(flush_all), lost_marker(_evict_guards)),
}  # fmt: skip
