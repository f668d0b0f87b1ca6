"""Ids that contain the shard of their row: 64-bit integers whose bits are divided into parts.

This module uses neither Django nor a database. An id is packed (made from its parts) and unpacked
(split into them). Both check each part: a number with too many bits would change the next part.

========================  =====================================================
:class:`PackedID`         shard, type, local id (Pinterest, P1)
:class:`TimestampedID`    milliseconds, shard, sequence (Instagram, I2)
========================  =====================================================

A layout says how many bits each part has. The default layouts are those that Pinterest and
Instagram published. All ids fit into a signed ``BIGINT``: they are from 0 to 2**63 - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from sharded_orm.exceptions import InvalidID, TimestampExhausted

_MILLISECOND = timedelta(milliseconds=1)
_UNIX = datetime(1970, 1, 1, tzinfo=UTC)

#: The default epoch of :class:`TimestampedLayout`: the time in an id counts milliseconds from here.
#: With the default widths, there are ids until 2059.
EPOCH = datetime(2025, 1, 1, tzinfo=UTC)


def _check(name: str, value: object, last: int | None = None) -> None:
    # Refuse a bool: it is an int in Python, but makes no sense as a part of an id.
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidID(f"{name}={value!r} is of type {type(value).__name__}; give an integer.")
    if value < 0 or (last is not None and value > last):
        limit = "0 at least" if last is None else f"0 to {last!r}"
        raise InvalidID(f"{name}={value!r} does not fit: it must be {limit}.")


@dataclass(frozen=True)
class _Layout:
    """Base class of the layouts. A layout says which bits of an id have which meaning.

    All layouts are frozen dataclasses, so they compare by value.
    """

    def deconstruct(self) -> tuple[str, tuple[()], dict[str, Any]]:
        """Return the dotted path of the class, and the arguments with which migrations recreate the
        layout.
        """
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
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
    """The widths, in bits, of the parts of a packed id.

    The parts are ``shard | type | local`` (Pinterest's layout, P1). ``type`` is the number of a
    table, ``local`` the row's number in the table. With the default widths of 16, 10 and 36 bits,
    the top two bits of an id are zero.

    :raises InvalidID: the sum of the widths is above 63, or a width is not a positive integer.
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
        """The number of bits below the shard number in an id.

        This is the ``SHIFT`` option of the embedded strategy, which reads the shard number from ids.
        """
        return self.type_bits + self.local_bits

    def pack(self, shard: int, type: int, local: int) -> int:
        """Return the id that consists of the numbers ``shard``, ``type`` and ``local``.

        :raises InvalidID: a part does not fit its bits; the message names the part.
        """
        _check("shard", shard, (1 << self.shard_bits) - 1)
        _check("type", type, (1 << self.type_bits) - 1)
        _check("local", local, (1 << self.local_bits) - 1)
        return shard << self.shard_shift | type << self.local_bits | local

    def unpack(self, value: int) -> PackedID:
        """Return the parts of the id ``value``.

        :raises InvalidID: ``value`` is not an id of this layout.
        """
        _check("id", value, (1 << self.shard_bits + self.shard_shift) - 1)
        return PackedID(
            value >> self.shard_shift,
            value >> self.local_bits & (1 << self.type_bits) - 1,
            value & (1 << self.local_bits) - 1,
            self,
        )

    def counted(self, shard: int, type: int) -> range:
        """Return all ids that rows of one table on ``shard`` can have, as a range.

        Their local parts go from 1 to the largest number that fits.

        :param type: the number of the table.
        """
        last = (1 << self.local_bits) - 1
        return range(self.pack(shard, type, 1), self.pack(shard, type, last) + 1)


PACKED = PackedLayout()


@dataclass(frozen=True)
class PackedID:
    """An id made of a shard, a type, and a number (Pinterest, P1).

    The type is the number of a table; the last part is the number of the row in that table.

    >>> PackedID.from_int(241294492511762325)
    PackedID(shard=3429, type=1, local=7075733)

    :raises InvalidID: a part is not an integer or does not fit its bits.
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
    """The epoch and the widths, in bits, of the parts of a timestamped id.

    The parts are ``milliseconds | shard | sequence`` (Instagram's layout, I2). The time is the
    highest part, so ids sort by time.

    :param epoch: the datetime, with a time zone, from which milliseconds are counted. It must never
        change: with another epoch, all existing ids would mean another time.

    The default widths of 41, 13 and 10 bits use all 64 bits. But the highest bit is the sign of a
    ``BIGINT``, so only 40 bits are left for the time. The last time that fits is 2**40 - 1 ms after
    the epoch, or 34.8 years.

    :raises InvalidID: a width is not a positive integer, the sum of the widths is above 64, no bit
        is left for the time, or the epoch is not a datetime with a time zone.
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
        """The number of bits below the shard number in an id.

        This is the ``SHIFT`` option of the embedded strategy, which reads the shard number from ids.
        """
        return self.sequence_bits

    @property
    def time_shift(self) -> int:
        return self.shard_bits + self.sequence_bits

    @property
    def last_millisecond(self) -> int:
        """The largest number of milliseconds after the epoch that fits into an id."""
        return int((1 << min(self.time_bits, 63 - self.time_shift)) - 1)

    @cached_property
    def epoch_milliseconds(self) -> int:
        """The Unix time of the epoch, in milliseconds."""
        return (self.epoch - _UNIX) // _MILLISECOND

    def pack(self, milliseconds: int, shard: int, sequence: int) -> int:
        """Return the id that consists of ``milliseconds``, ``shard`` and ``sequence``.

        :param milliseconds: milliseconds after the epoch.
        :raises TimestampExhausted: ``milliseconds`` is too late for this layout.
        :raises InvalidID: another part does not fit its bits; the message names the part.
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
        """Return the parts of the id ``value``.

        :raises InvalidID: ``value`` is not an id of this layout.
        """
        _check("id", value, (self.last_millisecond + 1 << self.time_shift) - 1)
        return TimestampedID(
            value >> self.time_shift,
            value >> self.sequence_bits & (1 << self.shard_bits) - 1,
            value & (1 << self.sequence_bits) - 1,
            self,
        )

    def milliseconds_of(self, moment: datetime) -> int:
        """Return the whole milliseconds from the epoch to ``moment``; negative before the epoch.

        :raises InvalidID: ``moment`` is not a datetime with a time zone.
        """
        if not isinstance(moment, datetime) or moment.utcoffset() is None:
            raise InvalidID(f"{moment!r} is no datetime with a time zone: give it one.")
        return (moment - self.epoch) // _MILLISECOND


TIMESTAMPED = TimestampedLayout()


@dataclass(frozen=True)
class TimestampedID:
    """An id made of a time in milliseconds, a shard, and a sequence number (Instagram, I2).

    >>> int(TimestampedID(1387263000, shard=31341 % 2000, sequence=5001 % 1024))
    11637205501278089

    :param milliseconds: milliseconds after the epoch of the layout.
    :raises TimestampExhausted: ``milliseconds`` is too late for the layout.
    :raises InvalidID: a part is not an integer or is negative, or ``shard`` or ``sequence`` does
        not fit its bits.
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
        """Return the id with the time ``moment``, the shard ``shard`` and the number ``sequence``.

        Every id that is made at ``moment`` or later is at least ``at(moment, 0, 0)``.

        :param moment: a datetime with a time zone.
        """
        return cls(layout.milliseconds_of(moment), shard, sequence, layout)

    @property
    def time(self) -> datetime:
        """The time at which the id was made, in the time zone of the epoch."""
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
