"""What can go wrong, each from its beginning to the use of what has recovered.

Every trouble may befall the real protocol, which survives it, and an ablation, which does
not: readers that know nothing of it find what is stale. Where the moment matters, an actor
is stopped there, and goes on (or dies) when the readers have passed by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tests.integration.cache.faults.actors import Actor
from tests.integration.cache.faults.judge import Question
from tests.integration.cache.faults.servers import guards_of, objects_of, table_guards
from tests.integration.cache.faults.stage import COMMIT_WITHIN, QUARANTINE, TIMEOUT, Stage
from tests.integration.cache.faults.world import ALBUMS

Trouble = Callable[[Stage], None]
_ATTEMPTS = 20


def stopped(stage: Stage, owner: int, lane: int, *stops: str, work: str | None = None) -> Actor:
    """An actor in the middle of a transaction, at the first of ``stops``."""
    actor = stage.actor()
    for _ in range(_ATTEMPTS):
        if actor.write(owner, lane, work or stage.work(), *stops):
            return actor
        # Refused because a cache server was down a moment ago, or a deadlock.
        stage.crowd.pass_by(owner)
    raise AssertionError(f"no transaction comes to {stops[0]!r}; the last one: {actor.result!r}")


def complete(stage: Stage, owner: int, lane: int, work: str | None = None) -> None:
    """One transaction, from begin to end."""
    actor = stage.actor()
    for _ in range(_ATTEMPTS):
        actor.write(owner, lane, work or stage.work())
        if actor.result == "commits":
            return stage.give_back(actor)
        stage.crowd.pass_by(owner)
    raise AssertionError(f"no transaction is committed; the last one: {actor.result!r}")


# ##### Nothing but bad moments #####


def late_fill(stage: Stage) -> None:
    """A reader has read a row, and stores it when it has been changed."""
    owner, lane = stage.place()
    reader = stage.actor()
    stage.warm(owner)
    for _ in range(_ATTEMPTS):
        # Nobody else is to store it first.
        with stage.crowd.away_from(owner):
            complete(stage, owner, lane, "create")
            complete(stage, owner, lane, "update_lane")
            item = stage.dice.choice(stage.items(owner, lane))
            if reader.read(stage.question("get", owner, lane, item), "filling"):
                complete(stage, owner, lane, "update_lane")
                reader.finish()
                judged(stage, reader)
                break
        judged(stage, reader)
    else:
        raise AssertionError("no read stores anything")
    stage.give_back(reader)
    stage.crowd.pass_by(owner)


def plain_write(stage: Stage) -> None:
    owner, lane = stage.place()
    stage.warm(owner)
    stage.crowd.pass_by(owner, rounds=6)
    complete(stage, owner, lane, "save")
    stage.crowd.pass_by(owner, rounds=6)


def torn_list(stage: Stage) -> None:
    """Rows change between the packets in which a reader fetches a list and its rows."""
    owner, lane = stage.place()
    # One that does not know yet which rows there are.
    reader, helper = stage.new_actor(), stage.actor()
    stage.warm(owner)
    with stage.crowd.away_from(owner):
        for kind in ("list", "album", "lane"):
            question = stage.question(kind, owner, lane)
            complete(stage, owner, lane, "create_many")
            store(stage, helper, question)
            # Between the first packet and the second one.
            if reader.read(question, "reading", "reading") and reader.go_on():
                complete(stage, owner, lane, "save_all")
                store(stage, helper, question)
                reader.finish()
            judged(stage, reader)
    stage.give_back(reader)
    stage.give_back(helper)
    stage.crowd.pass_by(owner)


def store(stage: Stage, reader: Actor, question: Question) -> None:
    """Have the answer to ``question`` in the cache, and all rows of its lane."""
    for album in ALBUMS:
        reader.read(replace(question, kind="album", album=album))
        judged(stage, reader)
    reader.read(question)
    judged(stage, reader)


def judged(stage: Stage, reader: Actor) -> None:
    stage.found += [reader.result] if reader.result is not None else []


def two_writers(stage: Stage) -> None:
    """One writer closes its markers when another one is about to commit, who then dies."""
    owner, lane = stage.place()
    stage.warm(owner)
    first = stopped(stage, owner, lane, "closing")
    second = stopped(stage, owner, lane, "committing", "closing")
    first.finish()
    stage.give_back(first)
    stage.crowd.pass_by(owner, rounds=3)
    second.go_on()
    stage.crowd.pass_by(owner)
    stage.kill(second)
    stage.crowd.pass_by(owner, rounds=3)


def slow_commit(stage: Stage) -> None:
    """A writer is about to commit for longer than a marker needs to count as old."""
    owner, lane = stage.place()
    actor = stopped(stage, owner, lane, "committing", "closing")
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        stage.crowd.pass_by(owner)
    stage.crowd.pass_by(owner, rounds=6)
    actor.go_on()
    stage.kill(actor)
    stage.crowd.pass_by(owner, rounds=6)


def rollback(stage: Stage) -> None:
    owner, lane = stage.place()
    actor = stage.actor()
    actor.write(owner, lane, stage.work(), keep=False)
    stage.give_back(actor)
    stage.crowd.pass_by(owner)


# ##### Writers that are killed #####


def dies_at(point: str) -> Trouble:
    def trouble(stage: Stage) -> None:
        owner, lane = stage.place()
        actor = stopped(stage, owner, lane, point)
        stage.crowd.pass_by(owner)
        stage.kill(actor)
        stage.crowd.pass_by(owner)

    trouble.__name__ = f"dies_at_{point}"
    return trouble


def dies_with_commit(stage: Stage) -> None:
    """COMMIT is sent; nobody is there for the answer."""
    owner, lane = stage.place()
    actor = stopped(stage, owner, lane, "committing")
    stage.crowd.pass_by(owner)
    actor.commit_and_die()
    stage.kill(actor)
    stage.crowd.pass_by(owner)


def dies_at_any_time(stage: Stage) -> None:
    stage.crowd.kill_a_writer(stage.dice.randrange(100))
    stage.crowd.pass_by(stage.place()[0])


# ##### The cache server does not answer #####


def pause(stage: Stage) -> None:
    owner, _ = stage.place()
    cache = stage.dice.choice(stage.caches)
    end = time.monotonic() + 4 * TIMEOUT
    with cache.paused():
        while time.monotonic() < end:
            stage.crowd.pass_by(owner)
    stage.crowd.pass_by(owner)


def pause_at(point: str) -> Trouble:
    """It stops answering when a writer has come there; what is sent then comes late."""

    def trouble(stage: Stage) -> None:
        owner, lane = stage.place()
        actor = stopped(stage, owner, lane, point)
        stage.crowd.pass_by(owner)
        cache = stage.dice.choice(stage.caches)
        with cache.paused():
            actor.finish()
            stage.crowd.pass_by(owner)
        stage.crowd.pass_by(owner)
        stage.give_back(actor)
        # Its next transaction brings what was left.
        complete(stage, owner, lane)
        stage.crowd.pass_by(owner)

    trouble.__name__ = f"pause_at_{point}"
    return trouble


def pause_and_die(stage: Stage) -> None:
    """It stops answering when a writer has committed, who does not live to see it back."""
    owner, lane = stage.place()
    actor = stopped(stage, owner, lane, "closing")
    with stage.dice.choice(stage.caches).paused():
        actor.finish()
        stage.kill(actor)
        stage.crowd.pass_by(owner)
    stage.crowd.pass_by(owner)


# ##### The cache server forgets #####


def evict_some(stage: Stage) -> None:
    stage.warm(stage.place()[0])
    for cache in stage.caches:
        cache.evict_some(stage.dice, 0.3)
    stage.crowd.pass_by(stage.place()[0])


def evict_guards(stage: Stage) -> None:
    owner, _ = stage.place()
    stage.warm(owner)
    _evict_guards(stage, owner)
    stage.crowd.pass_by(owner)


def _evict_guards(stage: Stage, owner: int) -> None:
    stage.evict(stage.dice.choice((guards_of, guards_of, table_guards))(owner))


def evict_again(stage: Stage) -> None:
    """A guard is lost, is used, and is lost again."""
    owner, lane = stage.place()
    stage.warm(owner)
    evict_all_guards(stage, owner)
    stage.warm(owner)
    stage.crowd.pass_by(owner, rounds=6)
    complete(stage, owner, lane, "save")
    evict_all_guards(stage, owner)
    stage.crowd.pass_by(owner, rounds=6)


def flush(stage: Stage) -> None:
    stage.warm(stage.place()[0])
    for cache in stage.caches:
        cache.flush()
    stage.crowd.pass_by(stage.place()[0])


def flood(stage: Stage) -> None:
    stage.warm(stage.place()[0])
    for cache in stage.caches:
        cache.flood(stage.dice)
    stage.crowd.pass_by(stage.place()[0])


def restart(stage: Stage) -> None:
    """It is killed and comes back; what it then remembers lacks a write."""
    owner, lane = stage.place()
    stage.warm(owner)
    cache = stage.dice.choice(stage.caches)
    cache.prepare_restart()
    complete(stage, owner, lane)
    cache.server.kill()
    cache.server.start()
    stage.crowd.pass_by(owner, rounds=6)


def restart_at(point: str) -> Trouble:
    """It is killed and comes back while a writer stands there; the writer then dies."""

    def trouble(stage: Stage) -> None:
        owner, lane = stage.place()
        stage.warm(owner)
        cache = stage.dice.choice(stage.caches)
        cache.prepare_restart()
        actor = stopped(stage, owner, lane, point, "closing")
        cache.server.kill()
        cache.server.start()
        stage.crowd.pass_by(owner)
        if point != "closing":
            actor.go_on()
            stage.crowd.pass_by(owner)
        stage.kill(actor)
        stage.crowd.pass_by(owner)

    trouble.__name__ = f"restart_at_{point}"
    return trouble


def lost_marker(how: Callable[[Stage, int], None]) -> Trouble:
    """The guard is lost between mark and COMMIT; readers pass; the writer commits and dies."""

    def trouble(stage: Stage) -> None:
        owner, lane = stage.place()
        stage.warm(owner)
        for _ in range(_ATTEMPTS):
            actor = stopped(stage, owner, lane, "committing", "closing")
            began = time.monotonic()
            how(stage, owner)
            # The first one makes new guards, the second one finds them clean.
            stage.crowd.pass_by(owner, rounds=6)
            if time.monotonic() - began < QUARANTINE - COMMIT_WITHIN:
                break
            # More than the protocol promises to survive: on a busy machine.
            stage.kill(actor)
        actor.go_on()
        stage.crowd.pass_by(owner)
        stage.kill(actor)
        stage.crowd.pass_by(owner, rounds=6)

    trouble.__name__ = f"lost_marker_{how.__name__.strip('_')}"
    return trouble


def evict_all_guards(stage: Stage, owner: int) -> None:
    stage.evict([*guards_of(owner), *table_guards(owner)])


def flush_all(stage: Stage, owner: int) -> None:
    for cache in stage.caches:
        cache.flush()


def dies_and_guard_is_lost(stage: Stage) -> None:
    """A writer dies with its objects still there, and the guard is lost with its marker."""
    owner, lane = stage.place()
    # Guards that say nothing yet, and objects that were stored under them.
    evict_all_guards(stage, owner)
    fills_from = time.monotonic() + QUARANTINE
    while time.monotonic() < fills_from:
        stage.crowd.pass_by(owner)
    # Also the leases of readers who were not allowed to store anything.
    stage.evict(objects_of(owner))
    stage.crowd.pass_by(owner, rounds=6)
    actor = stopped(stage, owner, lane, "closing", work="save_all")
    stage.kill(actor)
    evict_all_guards(stage, owner)
    stage.crowd.pass_by(owner, rounds=6)


# ##### The database does not answer #####


def session_is_killed(stage: Stage) -> None:
    owner, lane = stage.place()
    actor = stopped(stage, owner, lane, "committing")
    stage.crowd.pass_by(owner)
    stage.kill_session(actor.session)
    actor.finish()
    stage.give_back(actor)
    stage.crowd.pass_by(owner)


def connection_is_cut(stage: Stage) -> None:
    owner, lane = stage.place()
    actor = stopped(stage, owner, lane, "committing")
    stage.crowd.pass_by(owner)
    stage.proxy.cut()
    actor.finish()
    stage.crowd.pass_by(owner)
    stage.proxy.forward()
    stage.give_back(actor)
    stage.crowd.pass_by(owner)


def answer_is_lost(stage: Stage) -> None:
    """COMMIT arrives and is obeyed, and its sender does not hear of it."""
    owner, lane = stage.place()
    actor = stopped(stage, owner, lane, "committing")
    stage.crowd.pass_by(owner)
    stage.proxy.drop_answers()
    actor.finish()
    stage.crowd.pass_by(owner)
    stage.proxy.forward()
    stage.give_back(actor)
    stage.crowd.pass_by(owner)


#: What each mode is made of.
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
