"""Ids that hold the shard of their row: 64 bits, cut into parts.

Pure: no Django, no database. Every part is checked when an id is packed and when it is unpacked:
a number that does not fit its bits would change the part above it.

========================  =====================================================
:class:`PackedID`         shard, type, local id (Pinterest, P1)
:class:`TimestampedID`    milliseconds, shard, sequence (Instagram, I2)
========================  =====================================================

Each class has a layout, which holds the widths; the default is the published one.
All ids fit into a signed ``BIGINT``: 0 to 2**63 - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from sharded_orm.exceptions import InvalidID, TimestampExhausted

_MILLISECOND = timedelta(milliseconds=1)
_UNIX = datetime(1970, 1, 1, tzinfo=UTC)

#: The default epoch of :class:`TimestampedLayout`: its ids last until 2059.
EPOCH = datetime(2025, 1, 1, tzinfo=UTC)


def _check(name: str, value: object, last: int | None = None) -> None:
    # A bool is an int in Python, but no part of an id.
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidID(f"{name}={value!r} is of type {type(value).__name__}; give an integer.")
    if value < 0 or (last is not None and value > last):
        limit = "0 at least" if last is None else f"0 to {last!r}"
        raise InvalidID(f"{name}={value!r} does not fit: it must be {limit}.")


class _Layout:
    """Base of the layouts. Subclasses are frozen dataclasses, so they compare by value."""

    def deconstruct(self) -> tuple[str, tuple[()], dict[str, Any]]:
        """The form in which migrations write a layout: dotted path, arguments, keyword arguments."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]  # subclasses are
        return f"{type(self).__module__}.{type(self).__qualname__}", (), parts

    def _check_widths(self, total: int, **widths: int) -> None:
        for name, bits in widths.items():
            _check(name, bits)
            if bits < 1:
                raise InvalidID(f"{name} must be one bit at least, not {bits!r}.")
        if sum(widths.values()) > total:
            raise InvalidID(
                f"{widths!r} are {sum(widths.values())} bits together, and an id has {total}:"
                " make a part narrower."
            )


@dataclass(frozen=True)
class PackedLayout(_Layout):
    """``shard | type | local``; 16, 10 and 36 bits leave the top two bits at zero (P1).

    :raises InvalidID: the widths have more than 63 bits in all, or a width is no positive integer.
    """

    shard_bits: int = 16
    type_bits: int = 10
    local_bits: int = 36

    def __post_init__(self) -> None:
        self._check_widths(
            63,
            shard_bits=self.shard_bits,
            type_bits=self.type_bits,
            local_bits=self.local_bits,
        )

    @property
    def shard_shift(self) -> int:
        """The bits below the shard: ``SHIFT`` of the embedded strategy."""
        return self.type_bits + self.local_bits

    def pack(self, shard: int, type: int, local: int) -> int:
        """The id of these parts.

        :raises InvalidID: a part does not fit; the message names the part.
        """
        _check("shard", shard, (1 << self.shard_bits) - 1)
        _check("type", type, (1 << self.type_bits) - 1)
        _check("local", local, (1 << self.local_bits) - 1)
        return shard << self.shard_shift | type << self.local_bits | local

    def unpack(self, value: int) -> PackedID:
        """The parts of an id.

        :raises InvalidID: ``value`` is no id of this layout.
        """
        _check("id", value, (1 << self.shard_bits + self.shard_shift) - 1)
        return PackedID(
            value >> self.shard_shift,
            value >> self.local_bits & (1 << self.type_bits) - 1,
            value & (1 << self.local_bits) - 1,
            self,
        )

    def counted(self, shard: int, type: int) -> range:
        """The ids of the table of ``type`` on ``shard``: local id 1 to the last that fits."""
        last = (1 << self.local_bits) - 1
        return range(self.pack(shard, type, 1), self.pack(shard, type, last) + 1)


PACKED = PackedLayout()


@dataclass(frozen=True)
class PackedID:
    """An id made of a shard, a type, and the number of a row in its table there (P1).

    >>> PackedID.from_int(241294492511762325)
    PackedID(shard=3429, type=1, local=7075733)

    :raises InvalidID: a part is no integer or does not fit its bits.
    """

    shard: int
    type: int
    local: int
    layout: PackedLayout = PACKED

    def __post_init__(self) -> None:
        self.layout.pack(self.shard, self.type, self.local)

    @classmethod
    def from_int(cls, value: int, layout: PackedLayout = PACKED) -> PackedID:
        return layout.unpack(value)

    def to_int(self) -> int:
        return self.layout.pack(self.shard, self.type, self.local)

    __int__ = to_int

    def __repr__(self) -> str:
        other = "" if self.layout == PACKED else f", layout={self.layout!r}"
        return f"PackedID(shard={self.shard}, type={self.type}, local={self.local}{other})"


@dataclass(frozen=True)
class TimestampedLayout(_Layout):
    """``milliseconds | shard | sequence``; 41, 13 and 10 bits, so ids order by time (I2).

    :param epoch: the aware datetime from which milliseconds are counted. It must never
        change: all existing ids would mean another time.

    41 + 13 + 10 are all 64 bits, and the highest bit is the sign of a ``BIGINT``. So the time
    ends at 2**40 - 1 ms, 34.8 years after the epoch.

    :raises InvalidID: the widths have more than 64 bits in all, or leave no bit for the time,
        or the epoch is naive.
    """

    epoch: datetime = EPOCH
    time_bits: int = 41
    shard_bits: int = 13
    sequence_bits: int = 10

    def __post_init__(self) -> None:
        self._check_widths(
            64,
            time_bits=self.time_bits,
            shard_bits=self.shard_bits,
            sequence_bits=self.sequence_bits,
        )
        if self.time_shift > 62:
            raise InvalidID(f"time_bits={self.time_bits!r} is the sign of a BIGINT alone.")
        if not isinstance(self.epoch, datetime) or self.epoch.utcoffset() is None:
            raise InvalidID(
                f"The epoch must be a datetime with a time zone, not {self.epoch!r}: write"
                " datetime(2025, 1, 1, tzinfo=UTC)."
            )

    @property
    def shard_shift(self) -> int:
        """The bits below the shard: ``SHIFT`` of the embedded strategy."""
        return self.sequence_bits

    @property
    def time_shift(self) -> int:
        return self.shard_bits + self.sequence_bits

    @property
    def last_millisecond(self) -> int:
        """The last millisecond after the epoch that fits into an id."""
        return int((1 << min(self.time_bits, 63 - self.time_shift)) - 1)

    @cached_property
    def epoch_milliseconds(self) -> int:
        """The epoch in milliseconds of Unix time."""
        return (self.epoch - _UNIX) // _MILLISECOND

    def pack(self, milliseconds: int, shard: int, sequence: int) -> int:
        """The id of these parts.

        :raises TimestampExhausted: the time does not fit any more.
        :raises InvalidID: another part does not fit; the message names the part.
        """
        _check("milliseconds", milliseconds)
        if milliseconds > self.last_millisecond:
            raise TimestampExhausted(
                f"milliseconds={milliseconds!r} after {self.epoch.isoformat()} do not fit: ids of"
                f" this layout end at {self.last_millisecond!r}. Begin a new column with a later"
                " epoch."
            )
        _check("shard", shard, (1 << self.shard_bits) - 1)
        _check("sequence", sequence, (1 << self.sequence_bits) - 1)
        return milliseconds << self.time_shift | shard << self.sequence_bits | sequence

    def unpack(self, value: int) -> TimestampedID:
        """The parts of an id.

        :raises InvalidID: ``value`` is no id of this layout.
        """
        _check("id", value, (self.last_millisecond + 1 << self.time_shift) - 1)
        return TimestampedID(
            value >> self.time_shift,
            value >> self.sequence_bits & (1 << self.shard_bits) - 1,
            value & (1 << self.sequence_bits) - 1,
            self,
        )

    def milliseconds_of(self, moment: datetime) -> int:
        """``moment`` in whole milliseconds after the epoch; negative before it.

        :raises InvalidID: ``moment`` is no aware datetime.
        """
        if not isinstance(moment, datetime) or moment.utcoffset() is None:
            raise InvalidID(f"{moment!r} is no datetime with a time zone: give it one.")
        return (moment - self.epoch) // _MILLISECOND


TIMESTAMPED = TimestampedLayout()


@dataclass(frozen=True)
class TimestampedID:
    """An id made of a time, a shard, and a number among the ids of that millisecond (I2).

    >>> int(TimestampedID(1387263000, shard=31341 % 2000, sequence=5001 % 1024))
    11637205501278089

    :param milliseconds: milliseconds after the epoch of the layout.
    :raises TimestampExhausted: the time does not fit any more.
    :raises InvalidID: another part is no integer or does not fit its bits.
    """

    milliseconds: int
    shard: int
    sequence: int
    layout: TimestampedLayout = TIMESTAMPED

    def __post_init__(self) -> None:
        self.layout.pack(self.milliseconds, self.shard, self.sequence)

    @classmethod
    def from_int(cls, value: int, layout: TimestampedLayout = TIMESTAMPED) -> TimestampedID:
        return layout.unpack(value)

    @classmethod
    def at(
        cls,
        moment: datetime,
        shard: int,
        sequence: int,
        layout: TimestampedLayout = TIMESTAMPED,
    ) -> TimestampedID:
        """The id of an aware datetime: ``at(moment, 0, 0)`` is a lower bound of its ids."""
        return cls(layout.milliseconds_of(moment), shard, sequence, layout)

    @property
    def time(self) -> datetime:
        """When the id was made, in the time zone of the epoch."""
        return self.layout.epoch + self.milliseconds * _MILLISECOND

    def to_int(self) -> int:
        return self.layout.pack(self.milliseconds, self.shard, self.sequence)

    __int__ = to_int

    def __repr__(self) -> str:
        other = "" if self.layout == TIMESTAMPED else f", layout={self.layout!r}"
        return (
            f"TimestampedID(milliseconds={self.milliseconds}, shard={self.shard},"
            f" sequence={self.sequence}{other})"
        )
