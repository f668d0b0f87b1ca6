"""Check whether a replica can become the primary (a promotion). This module changes nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import Error

from sharded_orm import database_settings, runtime
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
    """What is known about the writes that a promotion without the old primary loses.

    The lost writes are those after the position ``received``. All positions refer to the old
    primary's binary log.

    :param received: the last position that the replica has received.
    :param executed: the last position that the replica has executed. The promotion waits until
        everything that was received is executed.
    :param idle: seconds since the replica executed its last event; None if the replica does not tell.
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
    """The results of the checks.

    :param problems: the reasons for which the promotion is refused; empty if it is not refused.
    :param old: the state of the old primary; None if the state was not read, or the server is not a
        MariaDB server.
    :param new: the state of the new primary; None in the same cases.
    :param link: the replication connection by which the new primary receives from the old primary;
        None if it was not found.
    :param loss: what a forced promotion loses; None for any other promotion.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    old: ReplicationStatus | None = None
    new: ReplicationStatus | None = None
    link: ReplicationLink | None = None
    loss: Loss | None = None


def operator(name: str) -> ReplicationServer:
    """Return a connection to node ``name`` with the account in the node's setting ``OPERATOR``.

    :raises PromotionRefused: the setting is missing, the server refuses the account, or the server
        does not answer. In the last two cases, ``__cause__`` is the database error.
    """
    entry = database_settings.operator_settings(name)
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
    """Whether :func:`operator` has raised ``exc`` because the node did not answer."""
    return isinstance(exc.__cause__, Error) and has_no_answer(exc.__cause__)


def examine(plan: PromotionPlan, *, force: bool, timeout: float) -> Findings:
    """Check on both servers everything that a promotion relies on. Return the results.

    :param force: whether to promote without the old primary, which must be dead.
    :param timeout: number of seconds that the replica may be behind the old primary.

    Cost: about ten round trips to each of the two servers. Without ``force``, also a login to each
    MariaDB server that is a primary or is in ``DATABASES``.
    """
    findings, topology = Findings(), runtime.topology()
    with contextlib.ExitStack() as stack:
        new = _session(plan.new, stack, findings)
        old = None if force else _session(plan.node, stack, findings, dead=_do_without(plan))
        if new is None or (old is None and not force):
            return findings
        _check_new(new, findings)
        if old is None:
            _check_dead(plan, findings)
        else:
            _check_old(old, findings)
        if findings.problems:
            return findings  # The next checks need results of the checks above.
        if old is None:
            _check_lost_link(topology, plan, new, findings)
        else:
            _check_link(plan, new, findings, timeout)
            _check_other_names(topology, plan, findings)
        _check_schemas(topology, plan, findings)
    return findings


def _do_without(plan: PromotionPlan) -> str:
    return (
        f"If {plan.node!r} is dead, --force does without it: what {plan.new!r} has not received is"
        " lost"
    )


def _session(
    name: str, stack: contextlib.ExitStack, findings: Findings, dead: str = ""
) -> ReplicationServer | None:
    """Log in to node ``name`` as the operator, and return the connection, which ``stack`` closes.

    If the login fails, add the reasons to ``findings.problems`` and return None.

    :param dead: advice for the operator that is added if the node does not answer; "" for no
        advice.
    """
    try:
        return stack.enter_context(operator(name))
    except PromotionRefused as exc:
        findings.problems += exc.problems
        if dead and is_silent(exc):
            findings.problems.append(dead)
        return None


def _check_new(new: ReplicationServer, findings: Findings) -> None:
    status = new.status()
    if not status.can_be_promoted:
        findings.problems.append(f"{new.name!r} is no MariaDB ({status.version})")
        return
    findings.new = status
    findings.problems += privilege_problems(new, TO_PROMOTE)
    if not (status.writes_log and status.logs_replicated):
        findings.warnings.append(
            f"{new.name!r} writes no binary log of what it replicates (log_bin,"
            " log_slave_updates): no other server can replicate from it afterwards"
        )


def _check_old(old: ReplicationServer, findings: Findings) -> None:
    status = old.status()
    if not status.can_be_promoted:
        findings.problems.append(f"{old.name!r} is no MariaDB ({status.version})")
        return
    findings.old = status
    if lacking := list(privilege_problems(old, TO_FENCE)):
        findings.problems += lacking
        return
    if not status.writes_log:
        findings.problems.append(
            f"{old.name!r} writes no binary log (log_bin): nothing replicates it"
        )
    findings.problems += [
        f"{old.name!r} does not log everything ({name} = {value!r}): rows would be lost"
        for name, value in old.log_filters().items()
    ]
    if status.read_only:
        findings.warnings.append(
            f"{old.name!r} is read_only already; it stays so if the promotion is undone"
        )


def privilege_problems(server: ReplicationServer, needed: Sequence[str]) -> Iterator[str]:
    """Yield which privileges of ``needed`` the account of ``server`` lacks, and how to grant them."""
    granted = server.privileges()
    missing = (
        []
        if "ALL PRIVILEGES" in granted
        else [privilege for privilege in needed if privilege not in granted]
    )
    if missing:
        yield (
            f"the OPERATOR account of node {server.name!r} lacks a privilege; there, run"
            f" GRANT {', '.join(missing)} ON *.* TO that account"
        )


# ##### Replication #####


def _check_link(
    plan: PromotionPlan, new: ReplicationServer, findings: Findings, timeout: float
) -> None:
    assert findings.old is not None
    assert findings.new is not None
    links = new.links()
    link = next(
        (candidate for candidate in links if candidate.source_id == findings.old.server_id), None
    )
    if link is None:
        findings.problems.append(no_link(plan.new, plan.node, links))
        return
    findings.link = link
    findings.problems += link_problems(plan.new, link)
    if not link.receives:
        findings.problems.append(
            f"{plan.new!r} does not receive from {plan.node!r}: {_reason(link)}"
        )
    elif link.seconds_behind is not None and link.seconds_behind > timeout:
        findings.problems.append(
            f"{plan.new!r} is {link.seconds_behind} s behind, more than the {timeout:g} s that"
            " writers may have to wait: let it come nearer, or allow more with --timeout"
        )
    domain = findings.old.domain
    server, number = positions(findings.new.logged).get(domain, (0, 0))
    if (
        server == findings.new.server_id
        and number > positions(findings.old.logged).get(domain, (0, 0))[1]
    ):
        findings.problems.append(
            f"{plan.new!r} has written by itself what {plan.node!r} does not have (event"
            f" {domain}-{server}-{number}): the two differ. Make the replica anew"
        )


def link_problems(new: str, link: ReplicationLink) -> Iterator[str]:
    """Yield why ``link`` may not bring everything to node ``new``."""
    if not link.uses_gtid:
        yield f"{new!r} replicates without GTID: CHANGE MASTER TO MASTER_USE_GTID = slave_pos"
    for name, value in link.filters.items():
        yield (f"{new!r} does not replicate everything ({name} = {value!r}): rows would be lost")
    if link.delay:
        yield f"{new!r} replicates {link.delay} s later on purpose (MASTER_DELAY): set it to 0"
    if not link.executes:
        yield f"{new!r} does not execute what it receives: {_reason(link)}"


def _reason(link: ReplicationLink) -> str:
    return link.error or "it was stopped. START SLAVE, and see that it comes near"


def no_link(new: str, old: str, links: Collection[ReplicationLink]) -> str:
    """Return a sentence that says that node ``new`` is not a replica of node ``old``.

    :param links: the replication connections of ``new``, which the sentence lists.
    """
    sources = ", ".join(map(_address_text, links))
    return (
        f"{new!r} does not replicate from {old!r}"
        + (f", only from {sources}" if sources else ", nor from any other server")
        + ". RANGES names it as the replica: correct that, or make it one"
    )


def _address_text(link: ReplicationLink) -> str:
    # The id of the source server is 0 if the replication link has never been connected.
    suffix = f" (not connected: {_reason(link)})" if not link.source_id else ""
    return f"{link.host}:{link.port}{suffix}"


# ##### Without the old primary #####


def _check_dead(plan: PromotionPlan, findings: Findings) -> None:
    if answers(plan):
        findings.problems.append(
            f"{plan.node!r} answers. Promote without --force, which loses nothing; if it must go,"
            " stop it first"
        )


def answers(plan: PromotionPlan) -> bool:
    """Whether the old primary answers. A refusal of the application's account counts as an answer.

    The call takes up to five seconds.
    """
    try:
        ReplicationServer(plan.node, runtime.topology().nodes[plan.node]).close()
    except Error as exc:
        return not has_no_answer(exc)
    return True


def _check_lost_link(
    topology: Topology, plan: PromotionPlan, new: ReplicationServer, findings: Findings
) -> None:
    links = new.links()
    node = topology.nodes[plan.node]
    link = next((candidate for candidate in links if _leads_to(candidate, node)), None)
    if link is None:
        findings.problems.append(no_link(plan.new, plan.node, links))
        return
    findings.link = link
    findings.problems += link_problems(plan.new, link)
    if link.receives:
        findings.problems.append(
            f"{plan.new!r} still receives from {plan.node!r}: it lives. Promote without --force"
        )
    findings.loss = Loss(link.received, link.executed, new.idle_seconds())


def _leads_to(link: ReplicationLink, node: Mapping[str, Any]) -> bool:
    """Whether ``link``, a replication connection, leads to the address of ``node``.

    :param node: the node's entry in ``NODES``.
    """
    port = int(node.get("PORT") or 3306)
    host = str(node.get("HOST") or "localhost")
    return port == link.port and bool(_addresses(host) & _addresses(link.host))


def _addresses(host: str) -> set[str]:
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        addresses = []
    return {host.lower(), *(str(entry[4][0]) for entry in addresses)}


# ##### Other uses of these servers #####


def _check_other_names(topology: Topology, plan: PromotionPlan, findings: Findings) -> None:
    """Add problems if the fence would stop too many writes, or too few.

    The *fence* is ``read_only``, which makes the whole server of the old primary read-only. It
    would stop too many writes if that server were also another primary of the topology, under a
    different address, or if it were in ``DATABASES``. It would stop too few writes if the
    application's accounts had a privilege to write in spite of ``read_only``.
    """
    assert findings.old is not None
    for name, node in topology.nodes.items():
        is_listed = name in plan.old_names or server_of(node, name) == server_of(
            topology.nodes[plan.node], plan.node
        )
        if not supports_promotion(node):
            continue
        is_primary = any(r.primary == name for g in topology.groups.values() for r in g.ranges)
        if not is_listed and not is_primary:
            continue
        try:
            with ReplicationServer(name, node) as application:
                is_same = application.status().identity == findings.old.identity
                if is_same and not is_listed:
                    findings.problems.append(
                        f"nodes {name!r} and {plan.node!r} are the same server by different"
                        " addresses: read_only would fence the ranges of both. Name it alike"
                    )
                if is_same:
                    findings.problems += _may_write_through(application, node)
        except Error as exc:
            # The old primary has answered before. So a server that does not answer now is another
            # one, and does not matter here.
            if is_listed or not has_no_answer(exc):
                findings.problems.append(_no_session_of_application(name, node, exc))
    findings.problems += _aliases_on(findings.old)


def _no_session_of_application(name: str, node: Mapping[str, Any], exc: Error) -> str:
    return why_no_session(name, f"the application's account {node.get('USER')!r}", exc)


def _may_write_through(server: ReplicationServer, node: Mapping[str, Any]) -> Iterator[str]:
    privileges = sorted(server.privileges() & WRITES_THROUGH)
    if privileges:
        yield (
            f"the application's account {node.get('USER')!r} of node {server.name!r} may write"
            f" through read_only ({', '.join(privileges)}): it could go on writing to the old primary."
            " Give the application an account with privileges on its schemas only"
        )


def _aliases_on(old: ReplicationStatus) -> Iterator[str]:
    """Yield problems for the entries of ``DATABASES`` that are on the old primary's server.

    Once the server is ``read_only``, writes through these entries would fail for good: a promotion
    moves only ranges of shards to the new primary, so the entries would stay on the old one.
    """
    groups = runtime.topology().groups
    for alias, entry in dict.items(settings.DATABASES):
        if alias in groups or not supports_promotion(entry):
            continue
        try:
            with ReplicationServer(alias, entry) as server:
                if server.status().identity != old.identity:
                    continue
        except Error as exc:
            if not has_no_answer(exc):
                yield (
                    f"Whether {alias!r} of DATABASES is on the same server is not known, and"
                    f" read_only would fence it for good: it gives no session ({exc})"
                )
            continue  # The old primary has answered, so the entry is on another server.
        yield (
            f"{alias!r} of DATABASES is on the same server: read_only would fence it for good. Move"
            " it to another server first"
        )


def _check_schemas(topology: Topology, plan: PromotionPlan, findings: Findings) -> None:
    """Add problems if the application's account does not see the moved shards on the new primary."""
    for name in plan.new_names:
        expected = {
            topology.groups[move.group].schema_name(number)
            for move in plan.moves
            if move.new == name
            for number in range(move.first, move.last + 1)
        }
        try:
            with ReplicationServer(name, topology.nodes[name]) as application:
                absent = sorted(expected - application.schemas())
        except Error as exc:
            findings.problems.append(_no_session_of_application(name, topology.nodes[name], exc))
            continue
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            findings.problems.append(
                f"on {name!r} the application's account does not see {', '.join(absent[:3])}{more}"
            )
