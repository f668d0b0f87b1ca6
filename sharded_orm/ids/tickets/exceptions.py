"""The errors of ids from ticket servers. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from collections.abc import Mapping

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from sharded_orm.exceptions import ShardedOrmError


class TicketError(ShardedOrmError):
    """Base class of the errors of ticket servers and their sequences."""


class UnknownSequence(TicketError, LookupError):
    """No ticket server has a sequence with the requested name."""


class TicketServerRequired(TicketError, RuntimeError):
    """The query reads sequences of ids, but does not say from which of several ticket servers."""


class InvalidSequence(TicketError, ValueError):
    """A sequence of ids cannot be created or moved, because its name, first id or way of counting
    is wrong.
    """


class SequenceNotChecked(TicketError, OperationalError):
    """A server or a shard is down. So nobody can tell which ids of a sequence exist or were handed
    out.
    """


class InvalidTicketCount(TicketError, ValueError):
    """The number of ids that a caller requests is not between 1 and 1,000,000."""


class SequenceExhausted(TicketError):
    """A sequence has handed out all its ids: no id is left below 2**63."""


class TicketServerMisconfigured(TicketError, ImproperlyConfigured):
    """A ticket server is not set up as ``TICKETS`` says, so other servers may hand out the same ids."""


class TicketServerBehind(TicketError, OperationalError):
    """A ticket server would hand out ids a second time, for example after a restore from a backup."""


class TicketServersUnavailable(TicketError, OperationalError):
    """No ticket server answered. :attr:`causes` has each server's error, keyed by the alias."""

    def __init__(self, sequence: str, causes: Mapping[str, BaseException]) -> None:
        self.causes: dict[str, BaseException] = dict(causes)
        shown = "; ".join(f"{alias!r}: {cause}" for alias, cause in self.causes.items())
        super().__init__(
            f"No ticket server could hand out an id of sequence {sequence!r} ({shown})."
            " 'manage.py tickets status' shows the state of each."
        )
