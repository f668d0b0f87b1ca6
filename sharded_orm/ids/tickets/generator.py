"""Ids from a pair of ticket servers (Flickr, F1-F5): odd ids from one, even ids from the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from django.core.exceptions import ImproperlyConfigured
from django.utils.asyncio import async_unsafe

from sharded_orm.conf import MAX_TICKETS, TicketOptions
from sharded_orm.exceptions import (
    InvalidTicketCount,
    SequenceExhausted,
    TicketServersUnavailable,
    UnknownSequence,
)
from sharded_orm.ids.base import IdGenerator
from sharded_orm.ids.tickets.blocks import Blocks
from sharded_orm.ids.tickets.pool import FAILURES
from sharded_orm.ids.tickets.round_robin import Turns
from sharded_orm.ids.tickets.server import OF_ONE_SEQUENCE, TicketServer
from sharded_orm.ids.tickets.session import SequenceSlot


class TicketGenerator(IdGenerator):
    """Takes ids from the servers in turn: step = number of servers, offset = position in the list.

    :param aliases: ``SHARDED_ORM["TICKETS"]``, in an order that never changes.
    :param turns: called with the number of servers; decides which is asked first.

    The generator uses connections of its own: the caller's transaction neither locks the
    sequence's row nor takes ids back. If a server does not answer, the next one serves; the first
    is left alone for a while, then one caller tries it again.
    """

    def __init__(
        self,
        aliases: Sequence[str],
        options: TicketOptions | None = None,
        turns: Callable[[int], Turns] = Turns,
    ) -> None:
        self.options = options = options or TicketOptions()
        count = len(aliases)
        self.servers = [
            TicketServer(
                alias,
                SequenceSlot(position, count),
                options.timeout / count,
                options.backoff,
                options.partner_down == "refuse",
            )
            for position, alias in enumerate(aliases, 1)
        ]
        if count > 1:
            for server, partner in zip(
                self.servers, self.servers[1:] + self.servers[:1], strict=True
            ):
                server.partner, partner.predecessor = partner, server
        # First server -> all servers, in the order in which they are asked.
        self._rounds = [self.servers[n:] + self.servers[:n] for n in range(count)]
        self._turns = turns(count)
        self._blocks = Blocks(options.block_size, self.take) if options.block_size > 1 else None

    def next(self, sequence: str) -> int:
        """One id. Costs one round trip, or one for each block of ``BLOCK_SIZE``. See :meth:`take`."""
        if self._blocks is not None:
            return self._blocks.next(sequence)
        return self.take(sequence, 1)[0]

    @async_unsafe
    def take(self, sequence: str, count: int) -> Sequence[int]:
        """``count`` ids, ascending, all of one server. One round trip.

        :param count: 1 to 1,000,000.
        :raises InvalidTicketCount: ``count`` is no such number.
        :raises SynchronousOnlyOperation: called in an event loop; use ``sync_to_async``.
        :raises UnknownSequence: no server has the sequence.
        :raises SequenceExhausted: fewer than ``count`` numbers are left below 2**63.
        :raises TicketServerMisconfigured: a server is not the one that ``TICKETS`` names.
        :raises TicketServersUnavailable: no server could serve; the message names the causes.
        """
        if type(count) is not int or not 1 <= count <= MAX_TICKETS:
            raise InvalidTicketCount(
                f"Cannot take {count!r} ids of {sequence!r}; take 1 to {MAX_TICKETS:,} at a time."
            )
        if not self.servers:
            raise ImproperlyConfigured(
                "SHARDED_ORM['TICKETS'] names no ticket server; list the aliases of the pair."
            )
        causes: dict[str, Exception] = {}
        for server, take in self._attempts(sequence):
            try:
                return take(sequence, count)
            except (*FAILURES, *OF_ONE_SEQUENCE) as exc:
                causes[server.alias] = exc
        first = next(iter(causes.values()))
        for kind in (UnknownSequence, SequenceExhausted):
            if all(isinstance(cause, kind) for cause in causes.values()):
                raise first
        raise TicketServersUnavailable(sequence, causes) from first

    def _attempts(
        self, sequence: str
    ) -> Iterator[tuple[TicketServer, Callable[[str, int], Sequence[int]]]]:
        """The healthy servers in turn; then, before giving up, those that are left alone."""
        started = time.monotonic()
        left_alone = []
        for server in self._rounds[self._turns.next(sequence)]:
            if server.claim(sequence):
                yield server, server.take
            else:
                left_alone.append(server)
        for server in left_alone:
            yield server, partial(server.probe, started=started)

    def close(self) -> None:
        """Close the idle connections; later requests open new ones."""
        for server in self.servers:
            server.close()
