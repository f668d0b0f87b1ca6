"""What must hold before a promotion touches anything. Reads only."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import Error

from sharded_orm import runtime
from sharded_orm.backends.mysql.replication import (
    TO_FENCE,
    TO_PROMOTE,
    WRITES_THROUGH,
    ReplicationLink,
    ReplicationServer,
    ReplicationStatus,
    has_no_answer,
    positions,
    why_no_session,
)
from sharded_orm.exceptions import PromotionRefused
from sharded_orm.operations.promotion.plan import PromotionPlan, supports_promotion
from sharded_orm.topology.model import Topology, server_of


@dataclass(frozen=True)
class Loss:
    """What is known of the writes that a promotion without the old primary gives up.

    :param received: the last position that has arrived on the replica.
    :param executed: the last position that it has executed; the rest is waited for.
    :param idle: seconds since it executed its last event; None if it does not tell.
    """

    received: str
    executed: str
    idle: float | None

    def __str__(self) -> str:
        since = (
            "at a time that it does not tell (the operator's account lacks PROCESS)"
            if self.idle is None
            else f"{self.idle:.0f} s ago"
        )
        return (
            f"The last event that the replica received is {self.received or 'none'}, the last that"
            f" it executed {self.executed or 'none'}, {since}. What was written after that is lost."
        )


@dataclass
class Findings:
    """What the checks have found; ``problems`` forbid the promotion."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    old: ReplicationStatus | None = None
    new: ReplicationStatus | None = None
    link: ReplicationLink | None = None
    loss: Loss | None = None


def operator(name: str) -> ReplicationServer:
    """A connection of the operator's account to node ``name``.

    :raises PromotionRefused: the node has no such account, refuses it, or does not answer. Its
        cause is the server's error, if there is one.
    """
    entry = runtime.operator_settings(name)
    if entry is None:
        raise PromotionRefused(
            [
                f"node {name!r} has no OPERATOR: give it"
                ' "OPERATOR": {"USER": …, "PASSWORD": …}, an account for fencing and promotion that'
                " the application does not use"
            ]
        )
    try:
        return ReplicationServer(name, entry)
    except Error as exc:
        raise PromotionRefused(
            [why_no_session(name, f"the OPERATOR account {entry['USER']!r}", exc)]
        ) from exc


def is_silent(exc: PromotionRefused) -> bool:
    """Whether :func:`operator` raised it because the node does not answer."""
    return isinstance(exc.__cause__, Error) and has_no_answer(exc.__cause__)


def examine(plan: PromotionPlan, *, force: bool, timeout: float) -> Findings:
    """Ask both servers for everything that a promotion relies on.

    :param force: the old primary is dead, and must be.
    :param timeout: seconds that the replica may be behind.

    About ten round trips to each server, and a login to each MariaDB of the project.
    """
    found, topology = Findings(), runtime.topology()
    with contextlib.ExitStack() as stack:
        new = _session(plan.new, stack, found)
        old = None if force else _session(plan.node, stack, found, dead=_do_without(plan))
        if new is None or (old is None and not force):
            return found
        _of_new(new, found)
        if old is None:
            _of_dead(plan, found)
        else:
            _of_old(old, found)
        if found.problems:
            return found  # What follows needs all of it.
        if old is None:
            _of_lost_link(topology, plan, new, found)
        else:
            _of_link(plan, new, found, timeout)
            _of_others(topology, plan, found)
        _of_schemas(topology, plan, found)
    return found


def _do_without(plan: PromotionPlan) -> str:
    return (
        f"If {plan.node!r} is dead, --force does without it: what {plan.new!r} has not received is"
        " lost"
    )


def _session(
    name: str, stack: contextlib.ExitStack, found: Findings, dead: str = ""
) -> ReplicationServer | None:
    """Log in once; what is wrong is a problem, and then what to do if the node is ``dead``."""
    try:
        return stack.enter_context(operator(name))
    except PromotionRefused as exc:
        found.problems += exc.problems
        if dead and is_silent(exc):
            found.problems.append(dead)
        return None


def _of_new(new: ReplicationServer, found: Findings) -> None:
    standing = new.standing()
    if not standing.is_mariadb:
        found.problems.append(f"{new.name!r} is no MariaDB ({standing.version})")
        return
    found.new = standing
    found.problems += _lacking(new, TO_PROMOTE)
    if not (standing.writes_log and standing.logs_replicated):
        found.warnings.append(
            f"{new.name!r} writes no binary log of what it replicates (log_bin,"
            " log_slave_updates): no other server can replicate from it afterwards"
        )


def _of_old(old: ReplicationServer, found: Findings) -> None:
    standing = old.standing()
    if not standing.is_mariadb:
        found.problems.append(f"{old.name!r} is no MariaDB ({standing.version})")
        return
    found.old = standing
    if lacking := list(_lacking(old, TO_FENCE)):
        found.problems += lacking
        return
    if not standing.writes_log:
        found.problems.append(f"{old.name!r} writes no binary log (log_bin): nothing replicates it")
    found.problems += [
        f"{old.name!r} does not log everything ({name} = {value!r}): rows would be lost"
        for name, value in old.log_filters().items()
    ]
    if standing.read_only:
        found.warnings.append(
            f"{old.name!r} is read_only already; it stays so if the promotion is undone"
        )


def _lacking(server: ReplicationServer, needed: Sequence[str]) -> Iterator[str]:
    have = server.privileges()
    lacks = [] if "ALL PRIVILEGES" in have else [each for each in needed if each not in have]
    if lacks:
        yield (
            f"the OPERATOR account of node {server.name!r} lacks a privilege; there, run"
            f" GRANT {', '.join(lacks)} ON *.* TO that account"
        )


# ##### Replication #####


def _of_link(plan: PromotionPlan, new: ReplicationServer, found: Findings, timeout: float) -> None:
    assert found.old is not None
    assert found.new is not None
    links = new.links()
    link = next((one for one in links if one.source_id == found.old.server_id), None)
    if link is None:
        found.problems.append(no_link(plan.new, plan.node, links))
        return
    found.link = link
    found.problems += _wrong_with(plan, link)
    if not link.receives:
        found.problems.append(f"{plan.new!r} does not receive from {plan.node!r}: {_why(link)}")
    elif link.seconds_behind is not None and link.seconds_behind > timeout:
        found.problems.append(
            f"{plan.new!r} is {link.seconds_behind} s behind, more than the {timeout:g} s that"
            " writers may have to wait: let it come nearer, or allow more with --timeout"
        )
    domain = found.old.domain
    server, number = positions(found.new.logged).get(domain, (0, 0))
    if (
        server == found.new.server_id
        and number > positions(found.old.logged).get(domain, (0, 0))[1]
    ):
        found.problems.append(
            f"{plan.new!r} has written by itself what {plan.node!r} does not have (event"
            f" {domain}-{server}-{number}): the two differ. Make the replica anew"
        )


def _wrong_with(plan: PromotionPlan, link: ReplicationLink) -> Iterator[str]:
    if not link.uses_gtid:
        yield f"{plan.new!r} replicates without GTID: CHANGE MASTER TO MASTER_USE_GTID = slave_pos"
    for name, value in link.filters.items():
        yield (
            f"{plan.new!r} does not replicate everything ({name} = {value!r}): rows would be lost"
        )
    if link.delay:
        yield f"{plan.new!r} replicates {link.delay} s later on purpose (MASTER_DELAY): set it to 0"
    if not link.executes:
        yield f"{plan.new!r} does not execute what it receives: {_why(link)}"


def _why(link: ReplicationLink) -> str:
    return link.error or "it was stopped. START SLAVE, and see that it comes near"


def no_link(new: str, old: str, links: Collection[ReplicationLink]) -> str:
    """Why ``new`` is no replica of ``old``, to judge by its ``links``."""
    known = ", ".join(map(_told, links))
    return (
        f"{new!r} does not replicate from {old!r}"
        + (f", only from {known}" if known else ", nor from any other server")
        + ". RANGES names it as the replica: correct that, or make it one"
    )


def _told(link: ReplicationLink) -> str:
    # One that never was connected does not know whom it would replicate from.
    state = f" (not connected: {_why(link)})" if not link.source_id else ""
    return f"{link.host}:{link.port}{state}"


# ##### Without the old primary #####


def _of_dead(plan: PromotionPlan, found: Findings) -> None:
    if answers(plan):
        found.problems.append(
            f"{plan.node!r} answers. Promote without --force, which loses nothing; if it must go,"
            " stop it first"
        )


def answers(plan: PromotionPlan) -> bool:
    """Whether the old primary answers, if only to refuse an account. Up to five seconds."""
    try:
        ReplicationServer(plan.node, runtime.topology().nodes[plan.node]).close()
    except Error as exc:
        return not has_no_answer(exc)
    return True


def _of_lost_link(
    topology: Topology, plan: PromotionPlan, new: ReplicationServer, found: Findings
) -> None:
    links = new.links()
    node = topology.nodes[plan.node]
    link = next((one for one in links if _leads_to(one, node)), None)
    if link is None:
        found.problems.append(no_link(plan.new, plan.node, links))
        return
    found.link = link
    found.problems += _wrong_with(plan, link)
    if link.receives:
        found.problems.append(
            f"{plan.new!r} still receives from {plan.node!r}: it lives. Promote without --force"
        )
    found.loss = Loss(link.received, link.executed, new.idle_seconds())


def _leads_to(link: ReplicationLink, node: Mapping[str, Any]) -> bool:
    """Whether the replica's address of its primary is that of the node."""
    port = int(node.get("PORT") or 3306)
    host = str(node.get("HOST") or "localhost")
    return port == link.port and bool(_addresses(host) & _addresses(link.host))


def _addresses(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        found = []
    return {host.lower(), *(str(entry[4][0]) for entry in found)}


# ##### Who else is on these servers #####


def _of_others(topology: Topology, plan: PromotionPlan, found: Findings) -> None:
    """Other names and accounts of the old primary: all of them would be fenced, or must be."""
    assert found.old is not None
    for name, node in topology.nodes.items():
        listed = name in plan.old_names or server_of(node, name) == server_of(
            topology.nodes[plan.node], plan.node
        )
        if not supports_promotion(node):
            continue
        is_primary = any(r.primary == name for g in topology.groups.values() for r in g.ranges)
        if not listed and not is_primary:
            continue
        try:
            with ReplicationServer(name, node) as application:
                same = application.standing().identity == found.old.identity
                if same and not listed:
                    found.problems.append(
                        f"nodes {name!r} and {plan.node!r} are the same server by different"
                        " addresses: read_only would fence the ranges of both. Name it alike"
                    )
                if same:
                    found.problems += _may_write_through(application, node)
        except Error as exc:
            # The old primary answers: another address that does not is not its.
            if listed or not has_no_answer(exc):
                found.problems.append(_no_session_of_application(name, node, exc))
    found.problems += _aliases_on(found.old)


def _no_session_of_application(name: str, node: Mapping[str, Any], exc: Error) -> str:
    return why_no_session(name, f"the application's account {node.get('USER')!r}", exc)


def _may_write_through(server: ReplicationServer, node: Mapping[str, Any]) -> Iterator[str]:
    through = sorted(server.privileges() & WRITES_THROUGH)
    if through:
        yield (
            f"the application's account {node.get('USER')!r} of node {server.name!r} may write"
            f" through read_only ({', '.join(through)}): it could go on writing to the old primary."
            " Give the application an account with privileges on its schemas only"
        )


def _aliases_on(old: ReplicationStatus) -> Iterator[str]:
    """Entries of ``DATABASES`` on the old primary, which no map leads elsewhere."""
    groups = runtime.topology().groups
    for alias, entry in dict.items(settings.DATABASES):
        if alias in groups or not supports_promotion(entry):
            continue
        try:
            with ReplicationServer(alias, entry) as server:
                if server.standing().identity != old.identity:
                    continue
        except Error as exc:
            if not has_no_answer(exc):
                yield (
                    f"Whether {alias!r} of DATABASES is on the same server is not known, and"
                    f" read_only would fence it for good: it gives no session ({exc})"
                )
            continue  # The old primary answers: what does not is elsewhere.
        yield (
            f"{alias!r} of DATABASES is on the same server: read_only would fence it for good. Move"
            " it to another server first"
        )


def _of_schemas(topology: Topology, plan: PromotionPlan, found: Findings) -> None:
    """The application must find its shards on the new primary."""
    for name in plan.new_names:
        wanted = {
            topology.groups[move.group].schema_name(number)
            for move in plan.moves
            if move.new == name
            for number in range(move.first, move.last + 1)
        }
        try:
            with ReplicationServer(name, topology.nodes[name]) as application:
                absent = sorted(wanted - application.schemas())
        except Error as exc:
            found.problems.append(_no_session_of_application(name, topology.nodes[name], exc))
            continue
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            found.problems.append(
                f"on {name!r} the application's account does not see {', '.join(absent[:3])}{more}"
            )
