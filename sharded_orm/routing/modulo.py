"""The modulo strategy: the key modulo the number of shards is the shard (Instagram, I4).

A text is hashed with md5 first (Pinterest's mod shard, P11).
"""

from __future__ import annotations

import hashlib
import uuid
from decimal import Decimal
from typing import Any

from sharded_orm.routing.base import Strategy, utf8_bytes


class ModuloStrategy(Strategy):
    """A strategy that computes the shard as the key modulo the number of shards.

    The shard is ``key % shards`` for integers, and ``md5(key) % shards`` for text, bytes and UUIDs.
    For example, with 4 shards, key 7 is on shard 3. The strategy stores nothing and sends no query.
    The number of shards can never change, because nearly every key would then belong on another
    shard.
    """

    def locate(self, key: Any) -> int:
        # stable_hash() returns an integer unchanged. Most keys are integers, so save the call.
        number = key if type(key) is int else stable_hash(key, self)
        return number % self.group.count

    def explain(self, key: Any) -> str:
        shown = repr(key) if isinstance(key, int) else f"md5({key!r})"
        return f"{shown} % {self.group.count}"


def stable_hash(key: Any, strategy: Strategy) -> int:
    """Return an integer for ``key`` that is the same in every process and on every machine.

    An integer, or a decimal without a fraction, is returned as an integer of the same value. For
    text, the result is the md5 of its UTF-8 bytes, read as a big-endian integer. This is the
    published rule of Pinterest (P11): ``"1.2.3.4"`` belongs to shard 1537 of 4096. Bytes and the 16
    bytes of a UUID are hashed in the same way.

    :raises InvalidShardKey: the key is of another type, or :func:`utf8_bytes` refuses its text.
    """
    if isinstance(key, int):
        return int(key)
    if isinstance(key, Decimal) and key == key.to_integral_value():
        return int(key)
    if isinstance(key, uuid.UUID):
        data = key.bytes
    elif isinstance(key, str):
        data = utf8_bytes(key, strategy)
    elif isinstance(key, bytes | bytearray | memoryview):
        data = bytes(key)
    else:
        raise strategy.invalid(key, "integers, text, bytes and UUIDs")
    return int.from_bytes(hashlib.md5(data, usedforsecurity=False).digest(), "big")
