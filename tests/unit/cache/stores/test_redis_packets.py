"""The packets that are made by hand are those of hiredis, and only usual answers are taken without it."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.cache.stores.redis.login import OWNER
from sharded_orm.cache.stores.redis.protocol import by_source, pack
from sharded_orm.cache.stores.redis.read_packets import is_answer, read_packet
from sharded_orm.cache.stores.redis.scripts import APPEND
from sharded_orm.cache.stores.redis.write_packets import (
    are_numbers,
    finish_packet,
    mark_packet,
    marked_sizes,
)

_INCARNATION = "0123456789ab"
_OWNED = b"f00d:0123456789ab"
_END = b"$17\r\n" + _OWNED + b"\r\n"
_GET_OWNER = (b"GET", OWNER)
_RECORDS = [[], [("a", b"+x\n")], [("a", b""), ("b" * 200, b"+x\r\n" * 300), ("c%N", b"-y\n")]]


def _packed(*commands: tuple[Any, ...]) -> bytes:
    return pack([*commands, _GET_OWNER], f"{_INCARNATION}:")


_NAMES = ["a", "b" * 200, "c%N", "d", ""]
_VALUES = [b"=h\n", b"", b"\r\n$3\r\n" * 300, b"+x\n", b"$"]


@pytest.mark.parametrize("count", range(1, 6))
def test_read_packet(count: int) -> None:
    names = _NAMES[:count]
    prefixed = [f"{_INCARNATION}:{name}".encode() for name in names]
    assert read_packet(names, _OWNED) == pack([(b"MGET", *prefixed, OWNER)])


def _answer(values: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(values) + b"".join(b"$%d\r\n%b\r\n" % (len(v), v) for v in values)


@pytest.mark.parametrize("count", range(1, 6))
def test_only_an_answer_with_the_same_values_and_incarnation_is_expected(count: int) -> None:
    values = _VALUES[:count]
    answer = _answer([*values, _OWNED])
    assert is_answer(answer, values, _OWNED)
    assert not any(is_answer(answer[:size], values, _OWNED) for size in range(len(answer)))
    assert not is_answer(answer + b"\r\n", values, _OWNED)
    assert not is_answer(answer, values, b"f00d:0123456789ac")
    assert not is_answer(_answer([*values, b"f00e:0123456789ab"]), values, _OWNED)
    for position, value in enumerate(values):
        for other in (value + b"\n", value[:-1] if value else b"-", b"-" + value[1:]):
            changed = [*values[:position], other, *values[position + 1 :]]
            assert not is_answer(_answer([*changed, _OWNED]), values, _OWNED)
            assert not is_answer(answer, changed, _OWNED)
    assert not is_answer(_answer(values[1:]), values, _OWNED)


@pytest.mark.parametrize("records", _RECORDS)
def test_mark_packet(records: list[tuple[str, bytes]]) -> None:
    commands: list[tuple[Any, ...]] = []
    for name, record in records:
        commands.append((b"SET", name, b"=h\n", b"NX", b"EX", b"7200"))
        commands.append((b"APPEND", name, record))
        commands.append((b"EXPIRE", name, b"7200"))
    assert mark_packet(records, b"=h\n", b"7200", _OWNED) == _packed(*commands)


@pytest.mark.parametrize("records", _RECORDS)
@pytest.mark.parametrize("objects", [[], ["o"], ["o", "p" * 99]])
def test_finish_packet(objects: list[str], records: list[tuple[str, bytes]]) -> None:
    commands: list[tuple[Any, ...]] = [(b"UNLINK", *objects)] if objects else []
    commands += [by_source((APPEND, name, record)) for name, record in records]
    assert finish_packet(objects, records, _OWNED) == _packed(*commands)


def test_sizes() -> None:
    answer = b"$-1\r\n:300\r\n:1\r\n+OK\r\n:70\r\n:1\r\n" + _END
    assert marked_sizes(answer, 2, _OWNED) == [300, 70]
    assert marked_sizes(answer, 1, _OWNED) is None
    assert marked_sizes(answer, 2, b"f00e:0123456789ab") is None
    assert all(marked_sizes(answer[:size], 2, _OWNED) is None for size in range(len(answer)))


@pytest.mark.parametrize(
    "answer",
    [
        b"-OOM no memory\r\n:300\r\n:1\r\n",
        b"$-1\r\n-OOM no memory\r\n:1\r\n",
        b"$-1\r\n:300\r\n:0\r\n",
        b"$-1\r\n:-1\r\n:1\r\n",
        b"$-1\r\n:\r\n:1\r\n",
        b":300\r\n:1\r\n",
        b"$-1\r\n:300\r\n:1\r\n:1\r\n",
        b"$-1\r\n:300\r\n:1",
    ],
)
def test_unusual_sizes(answer: bytes) -> None:
    assert marked_sizes(answer + _END, 1, _OWNED) is None


def test_numbers() -> None:
    answer = b":1\r\n:0\r\n" + _END
    assert are_numbers(answer, 2, _OWNED)
    assert not are_numbers(answer, 1, _OWNED)
    assert not are_numbers(answer, 3, _OWNED)
    assert not are_numbers(answer, 2, b"f00e:0123456789ab")
    assert not any(are_numbers(answer[:size], 2, _OWNED) for size in range(len(answer)))
    assert not are_numbers(b"-NOPERM no\r\n:0\r\n" + _END, 2, _OWNED)
    assert not are_numbers(b":1\r\n$-1\r\n" + _END, 2, _OWNED)
    assert not are_numbers(b":1\r\n:-1\r\n" + _END, 2, _OWNED)
