"""Check whether a replica can replace its primary. Such a replacement is a *promotion*.

The checks change one thing only: if a transaction in two phases was interrupted and its outcome is
decided, its prepared parts are committed or rolled back.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import Error

from sharded_orm import database_settings, runtime
from sharded_orm.backends.replication import (
    FenceTexts,
    ReplicationLink,
    ReplicationServer,
    ReplicationStatus,
    can_be_promoted,
    server_class,
)
from sharded_orm.operations.exceptions import PromotionRefused
from sharded_orm.operations.promotion.plan import PromotionPlan, databases_of
from sharded_orm.topology.model import Topology, instance_of
from sharded_orm.two_phase.app import is_enabled
from sharded_orm.two_phase.recovery import left_on


@dataclass(frozen=True)
class Loss:
    """What is known about the writes that are lost if the old primary is dead.

    The replica never gets the writes that it has not received, so they are lost. The positions are
    those in the old primary's log.

    :param received: the last position that the replica has received. All later writes are lost.
    :param executed: the last position that the replica has executed. The promotion waits until the
        replica has executed all that it has received.
    :param idle: seconds since the replica executed its last event; None if the replica does not
        report it.
    """

    received: str
    executed: str
    idle: float | None

    def __str__(self) -> str:
        since = "at a time that it does not tell" if self.idle is None else f"{self.idle:.0f} s ago"
        return (
            f"The last event that the replica received is {self.received or 'none'}, the last that"
            f" it executed {self.executed or 'none'}, {since}. What was written after that is lost."
        )


@dataclass
class Findings:
    """The results of the checks before a promotion.

    :param problems: the reasons why the promotion is refused; empty if it is not refused.
    :param warnings: sentences about facts that do not prevent the promotion.
    :param old: the state of the old primary; None if the state was not read, or the server is not
        of a kind that can be promoted.
    :param new: the state of the new primary; None in the same cases as for ``old``.
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


def operator(name: str, plan: PromotionPlan) -> ReplicationServer:
    """Connect to node ``name`` with the account in the node's setting ``OPERATOR``.

    This account may make a server refuse writes, and may promote it. The application does not use
    it.

    :param plan: the plan of the promotion, to which the node belongs.
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
    kind = plan.server_class
    try:
        return kind(name, entry, databases_of(runtime.topology(), plan.old_names))
    except Error as exc:
        raise PromotionRefused(
            [kind.why_no_session(name, f"the OPERATOR account {entry['USER']!r}", exc)]
        ) from exc


def is_silent(plan: PromotionPlan, exc: PromotionRefused) -> bool:
    """Return whether :func:`operator` has raised ``exc`` because the node did not answer.

    The other reasons are a missing setting and a refused account.
    """
    return isinstance(exc.__cause__, Error) and plan.server_class.has_no_answer(exc.__cause__)


def examine(plan: PromotionPlan, *, force: bool, timeout: float) -> Findings:
    """Check on both servers everything that a promotion relies on. Return the results.

    :param force: whether the promotion does without the old primary. Then this server must be dead.
    :param timeout: the largest number of seconds that the replica may be behind the old primary.
        The promotion is refused if the replica is further behind.

    Cost: about ten round trips to each of the two servers. Without ``force``, also a login to each
    server of the same product that is a primary or is in ``DATABASES``.
    """
    findings, topology = Findings(), runtime.topology()
    with contextlib.ExitStack() as stack:
        new = _session(plan.new, plan, stack, findings)
        old = None if force else _session(plan.node, plan, stack, findings, dead=_do_without(plan))
        if new is None or (old is None and not force):
            return findings
        _check_new(new, findings)
        if old is None:
            _check_dead(plan, findings)
        else:
            _check_old(old, findings)
        if findings.problems:
            # Stop here, because the checks below need two servers that passed the checks above.
            return findings
        if old is None:
            _check_lost_link(topology, plan, new, findings)
        else:
            _check_link(old, new, findings, timeout)
            _check_other_names(topology, plan, old, findings)
            _check_branches(topology, plan, old, findings)
        _check_schemas(topology, plan, findings)
    return findings


def _do_without(plan: PromotionPlan) -> str:
    return (
        f"If {plan.node!r} is dead, --force does without it: what {plan.new!r} has not received is"
        " lost"
    )


def _session(
    name: str,
    plan: PromotionPlan,
    stack: contextlib.ExitStack,
    findings: Findings,
    dead: str = "",
) -> ReplicationServer | None:
    """Log in to node ``name`` with the operator's account, and return the connection.

    ``stack`` closes the connection. If the login fails, add the reasons to ``findings.problems``,
    and return None.

    :param dead: a sentence that is added to the problems if the node does not answer, such as the
        advice to promote with ``--force``; "" adds nothing.
    """
    try:
        return stack.enter_context(operator(name, plan))
    except PromotionRefused as exc:
        findings.problems += exc.problems
        if dead and is_silent(plan, exc):
            findings.problems.append(dead)
        return None


def _check_new(new: ReplicationServer, findings: Findings) -> None:
    status = new.status()
    if not status.can_be_promoted:
        findings.problems.append(f"{new.name!r} is no {new.product} ({status.version})")
        return
    findings.new = status
    findings.problems += new.privilege_problems("promote")
    findings.warnings += new.warnings("promote")


def _check_old(old: ReplicationServer, findings: Findings) -> None:
    status = old.status()
    if not status.can_be_promoted:
        findings.problems.append(f"{old.name!r} is no {old.product} ({status.version})")
        return
    findings.old = status
    if lacking := list(old.privilege_problems("fence")):
        findings.problems += lacking
        return
    findings.problems += old.source_problems()
    findings.warnings += old.warnings("fence")
    if status.read_only:
        findings.warnings.append(
            f"{old.name!r} {old.texts.is_fenced} already; it stays so if the promotion is undone"
        )


# ##### Replication #####


def _check_link(
    old: ReplicationServer, new: ReplicationServer, findings: Findings, timeout: float
) -> None:
    link = new.link_from(old)
    if link is None:
        findings.problems.append(no_link(new.name, old.name, new.links(), new.texts))
        return
    findings.link = link
    findings.problems += link_problems(new, link)
    if not link.receives:
        findings.problems.append(
            f"{new.name!r} does not receive from {old.name!r}: {_reason(link, new.texts)}"
        )
    elif link.seconds_behind is not None and link.seconds_behind > timeout:
        findings.problems.append(
            f"{new.name!r} is {link.seconds_behind} s behind, more than the {timeout:g} s that"
            " writers may have to wait: let it come nearer, or allow more with --timeout"
        )
    findings.problems += new.replica_problems(old, link)


def link_problems(new: ReplicationServer, link: ReplicationLink) -> Iterator[str]:
    """Yield a sentence for each reason why the replica ``new`` may miss a write of its primary.

    :param link: the replication connection of ``new``.
    """
    yield from new.link_problems(link)
    if not link.executes:
        yield f"{new.name!r} does not execute what it receives: {_reason(link, new.texts)}"


def _reason(link: ReplicationLink, texts: FenceTexts) -> str:
    return link.error or f"it was stopped. {texts.to_start}, and see that it comes near"


def no_link(new: str, old: str, links: Collection[ReplicationLink], texts: FenceTexts) -> str:
    """Return a sentence that says that node ``new`` is not a replica of node ``old``.

    :param links: the replication connections of ``new``, which the sentence lists.
    """
    sources = ", ".join(_address_text(link, texts) for link in links)
    return (
        f"{new!r} does not replicate from {old!r}"
        + (f", only from {sources}" if sources else ", nor from any other server")
        + ". RANGES names it as the replica: correct that, or make it one"
    )


def _address_text(link: ReplicationLink, texts: FenceTexts) -> str:
    suffix = "" if link.is_connected else f" (not connected: {_reason(link, texts)})"
    return f"{link.host}:{link.port}{suffix}"


# ##### Without the old primary #####


def _check_dead(plan: PromotionPlan, findings: Findings) -> None:
    if answers(plan):
        findings.problems.append(
            f"{plan.node!r} answers. Promote without --force, which loses nothing; if it must go,"
            " stop it first"
        )


def answers(plan: PromotionPlan) -> bool:
    """Return whether the old primary answers.

    A server that refuses the account has answered: it is alive. The call takes up to five seconds.
    """
    kind = plan.server_class
    try:
        kind(plan.node, runtime.topology().nodes[plan.node]).close()
    except Error as exc:
        return not kind.has_no_answer(exc)
    return True


def _check_lost_link(
    topology: Topology, plan: PromotionPlan, new: ReplicationServer, findings: Findings
) -> None:
    links = new.links()
    node = topology.nodes[plan.node]
    link = next(
        (candidate for candidate in links if _leads_to(candidate, node, new.default_port)), None
    )
    if link is None:
        findings.problems.append(no_link(plan.new, plan.node, links, new.texts))
        return
    findings.link = link
    findings.problems += link_problems(new, link)
    if link.receives:
        findings.problems.append(
            f"{plan.new!r} still receives from {plan.node!r}: it lives. Promote without --force"
        )
    findings.loss = Loss(link.received, link.executed, new.idle_seconds())


def _leads_to(link: ReplicationLink, node: Mapping[str, Any], default_port: int) -> bool:
    """Return whether the replica receives by ``link`` from the server of ``node``.

    Compares the port, and the addresses to which the two host names resolve.

    :param node: the node's entry in ``NODES``.
    """
    port = int(node.get("PORT") or default_port)
    host = str(node.get("HOST") or "localhost")
    return port == link.port and bool(_addresses(host) & _addresses(link.host))


def _addresses(host: str) -> set[str]:
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        addresses = []
    return {host.lower(), *(str(entry[4][0]) for entry in addresses)}


# ##### Other uses of these servers #####


def _check_other_names(
    topology: Topology, plan: PromotionPlan, old: ReplicationServer, findings: Findings
) -> None:
    """Add problems if the fence of the old primary would refuse the wrong writes.

    A promotion fences the old primary: it makes the whole server refuse writes. It would refuse too
    much if the same server is also a primary by a different address, or is in ``DATABASES``. It
    would refuse too little if an account of the application may write to a fenced server.
    """
    assert findings.old is not None
    identity = findings.old.identity
    for name, node in topology.nodes.items():
        is_listed = name in plan.old_names or instance_of(node, name) == instance_of(
            topology.nodes[plan.node], plan.node
        )
        if not _is_like(old, node):
            continue
        is_primary = any(r.primary == name for g in topology.groups.values() for r in g.ranges)
        if not is_listed and not is_primary:
            continue
        if is_listed and findings.old.closed:
            continue  # The old primary is closed (fenced), so the account cannot be checked.
        account = f"the application's account {node.get('USER')!r}"
        try:
            with type(old)(name, node) as application:
                is_same = application.status().identity == identity
                if is_same and not is_listed:
                    findings.problems.append(
                        f"nodes {name!r} and {plan.node!r} are the same server by different"
                        f" addresses: {old.texts.name} would fence the ranges of both. Name it alike"
                    )
                if is_same:
                    findings.problems += application.application_problems(account)
        except Error as exc:
            # Ignore a server that does not answer: it cannot be the old primary, which has answered
            # before. But if the node is listed as the old primary, report the error.
            if is_listed or not old.has_no_answer(exc):
                findings.problems.append(old.why_no_session(name, account, exc))
    findings.problems += _aliases_on(old, identity)


def _check_branches(
    topology: Topology, plan: PromotionPlan, old: ReplicationServer, findings: Findings
) -> None:
    """Try to end the prepared transactions on the shards that move, and report what is left.

    A prepared branch is the part on one shard of a transaction that is committed in two phases. If
    it is decided whether the transaction is committed, and the old primary accepts writes, the
    branch is committed or rolled back. Then a problem is added to ``findings`` for each branch that
    is still prepared.
    """
    problems = list(branch_problems(plan, old))
    if problems and findings.old is not None and not findings.old.closed:
        try:
            for move in plan.moves:
                group = topology.groups[move.group]
                left_on(group, [group.shard(number) for number in range(move.first, move.last + 1)])
        except Error as exc:
            problems.append(f"a recovery failed ({exc})")
        else:
            problems = list(branch_problems(plan, old))
    findings.problems += problems


def branch_problems(plan: PromotionPlan, old: ReplicationServer) -> Iterator[str]:
    """Yield a problem for each prepared branch on the shards that move. One query.

    A prepared branch is the part on one shard of a transaction that is committed in two phases. If
    this site does not use two-phase commits, yield nothing: any branches on the server belong to
    another application.
    """
    if not is_enabled():
        return
    groups = runtime.topology().groups
    schemas = {
        groups[move.group].schema_name(number)
        for move in plan.moves
        for number in range(move.first, move.last + 1)
    }
    for branch in old.prepared_branches():
        if branch.schema in schemas:
            yield (
                f"a transaction in two phases, {branch.transaction!r}, is prepared in"
                f" {branch.schema!r} on {old.name!r}, and a recovery must end it before. 'manage.py"
                " transactions recover' does so when it can, and says what it waits for"
            )


def _is_like(server: ReplicationServer, settings: Mapping[str, Any]) -> bool:
    """Return whether ``settings`` are those of a server of the same product as ``server``.

    Settings of a different product, such as PostgreSQL instead of MariaDB, cannot be those of
    ``server`` itself.
    """
    return can_be_promoted(settings) and isinstance(server, server_class(settings))


def _aliases_on(old: ReplicationServer, identity: str) -> Iterator[str]:
    """Yield a problem for each entry of ``DATABASES`` that is on the old primary's server.

    A promotion moves only shards to the new primary. A plain database of Django would stay on the
    old primary, which refuses writes from then on. And the database would be lost when the operator
    makes this server a replica.
    """
    groups = runtime.topology().groups
    for alias, entry in dict.items(settings.DATABASES):
        if alias in groups or not _is_like(old, entry):
            continue
        try:
            with type(old)(alias, entry) as server:
                if server.status().identity != identity:
                    continue
        except Error as exc:
            if not old.has_no_answer(exc):
                yield (
                    f"Whether {alias!r} of DATABASES is on the same server is not known, and"
                    f" {old.texts.name} would fence it for good: it gives no session ({exc})"
                )
            # Skip a server that does not answer: it cannot be the old primary, which has answered
            # before.
            continue
        yield (
            f"{alias!r} of DATABASES is on the same server: {old.texts.name} would fence it for good."
            " Move it to another server first"
        )


def _check_schemas(topology: Topology, plan: PromotionPlan, findings: Findings) -> None:
    """Add problems if the application's account cannot see the moved shards on the new primary."""
    if findings.new is not None and findings.new.closed:
        # The application's account cannot log in on the new primary, so the check is not possible.
        # The reason is an earlier attempt at this promotion: it has forbidden log-ins on the
        # server that is still the primary, and replication has copied this to the other server.
        findings.warnings.append(
            f"{plan.new!r} is closed until it is the primary, so whether the application's account sees"
            " its shards there is not known"
        )
        return
    for name in plan.new_names:
        expected = {
            topology.groups[move.group].schema_name(number)
            for move in plan.moves
            if move.new == name
            for number in range(move.first, move.last + 1)
        }
        node = topology.nodes[name]
        kind = plan.server_class
        try:
            with kind(name, node) as application:
                absent = sorted(expected - application.schemas())
        except Error as exc:
            account = f"the application's account {node.get('USER')!r}"
            findings.problems.append(kind.why_no_session(name, account, exc))
            continue
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            findings.problems.append(
                f"on {name!r} the application's account does not see {', '.join(absent[:3])}{more}"
            )
