"""The generator of ids from ticket servers.

With two servers, one hands out the odd ids, and the other the even ids (Flickr, F1-F5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from django.core.exceptions import ImproperlyConfigured
from django.utils.asyncio import async_unsafe

from sharded_orm.conf import MAX_TICKETS, TicketOptions
from sharded_orm.ids.tickets.blocks import Blocks
from sharded_orm.ids.tickets.exceptions import (
    InvalidTicketCount,
    SequenceExhausted,
    TicketServersUnavailable,
    UnknownSequence,
)
from sharded_orm.ids.tickets.pool import FAILURES
from sharded_orm.ids.tickets.round_robin import Turns
from sharded_orm.ids.tickets.server import OF_ONE_SEQUENCE, TicketServer
from sharded_orm.ids.tickets.session import SequenceSlot


class TicketGenerator:
    """A generator of 64-bit ids, which it takes from several ticket servers (databases that only
    count) in turn. Thread-safe.

    A *sequence* is a named series of ids, such as the ids of one model. No two calls return the
    same id of a sequence. Of N servers, the first in the list gives the ids 1, 1 + N, 1 + 2N, …,
    and the second gives the ids 2, 2 + N, …

    The generator does not use Django's connections. So a transaction of the caller does not lock
    the row of the sequence, and its rollback does not take ids back. If a server does not answer,
    the next one is asked. For ``BACKOFF`` seconds, the failed server is asked again only if no
    other server gives an id. After these seconds, one caller tries it, and if it answers, all
    callers use it again.

    :param aliases: the database aliases in ``SHARDED_ORM["TICKETS"]``; their order must never
        change.
    :param options: ``SHARDED_ORM["TICKET_OPTIONS"]``; None means the defaults.
    :param turns: makes the :class:`Turns`, which choose the server that is asked first; called with
        the number of servers.
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
        # Item n is the list of the servers in the order in which to ask them, if server n is asked
        # first. For example, with servers A, B, C, item 1 is [B, C, A].
        self._rounds = [self.servers[n:] + self.servers[:n] for n in range(count)]
        self._turns = turns(count)
        self._blocks = Blocks(options.block_size, self.take) if options.block_size > 1 else None

    def next(self, sequence: str) -> int:
        """Return a new id of ``sequence``. Raises the same errors as :meth:`take`.

        Costs one round trip. With the option ``BLOCK_SIZE``, only one call in ``BLOCK_SIZE`` costs a
        round trip, because the process takes a block of ids in advance.
        """
        if self._blocks is not None:
            return self._blocks.next(sequence)
        return self.take(sequence, 1)[0]

    @async_unsafe
    def take(self, sequence: str, count: int) -> Sequence[int]:
        """Return ``count`` new ids of ``sequence``, ascending, all from one server.

        :param count: an integer from 1 to 1,000,000. Any number of ids costs one round trip.
        :raises InvalidTicketCount: ``count`` is not such an integer.
        :raises SynchronousOnlyOperation: called in an event loop; use ``sync_to_async``.
        :raises UnknownSequence: no server has the sequence.
        :raises SequenceExhausted: no server has ``count`` numbers left below 2**63.
        :raises TicketServerMisconfigured: a server is set up so that it may repeat ids, for example
            because ``TICKETS`` has another order than when the sequence was made.
        :raises TicketServersUnavailable: no server gave ids; the message names the causes.
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
        """Yield the servers in the order in which to ask them, each with its method to call.

        Servers that failed lately come last, with a method that lets only one caller ask at a time.
        """
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
        """Close the idle connections to all servers; later requests open new ones."""
        for server in self.servers:
            server.close()
