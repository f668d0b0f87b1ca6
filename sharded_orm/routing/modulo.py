"""The modulo strategy (Instagram, I4); text by its md5 (Pinterest's mod shard, P11)."""

from __future__ import annotations

import hashlib
import uuid
from decimal import Decimal
from typing import Any

from sharded_orm.routing.base import Strategy, utf8_bytes


class ModuloStrategy(Strategy):
    """Computes ``key % shards`` for integers, ``md5(key) % shards`` for text, bytes and UUIDs.

    Stateless; needs no query. The number of shards can never change, because nearly every key
    would move.
    """

    def locate(self, key: Any) -> int:
        return stable_hash(key, self) % self.group.count

    def explain(self, key: Any) -> str:
        shown = repr(key) if isinstance(key, int) else f"md5({key!r})"
        return f"{shown} % {self.group.count}"


def stable_hash(key: Any, strategy: Strategy) -> int:
    """An integer for ``key`` that is the same in every process and on every machine.

    An integer is returned as it is. Text becomes the big-endian integer of the md5 of its UTF-8
    form, by the published rule of P11 (``"1.2.3.4"`` gives shard 1537 of 4096).
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
