"""The answers to memcached's command ``get``, and to the commands that mark guards."""

from __future__ import annotations

import pytest

from sharded_orm.cache.stores.memcached import protocol
from sharded_orm.cache.stores.memcached.protocol import get_packet, marked_sizes, parse_values
from sharded_orm.cache.stores.sockets import ProtocolError

NAMES = ["a", "bb", "c"]
VALUES: list[dict[str, bytes]] = [
    {"a": b"1", "bb": b"two", "c": b"=3\n"},
    {"a": b"1", "c": b"3"},
    {"bb": b"two"},
    {},
    {"a": b"", "bb": b"two", "c": b"3"},
    {"a": b"x\r\ny", "bb": b"two", "c": b"3"},
    # A value that looks like the answer about another name.
    {"a": b"1\r\nVALUE bb 0 1\r\n2"},
    {"a": b"1\r\nEND\r\n", "bb": b"two", "c": b"3"},
    {"a": b"END", "bb": b"VALUE", "c": b"END\r\n"},
    {"bb": b"END", "c": b"x\r\nEND"},
]


def answer(values: dict[str, bytes]) -> bytes:
    parts = [b"VALUE %b 0 %d\r\n%b\r\n" % (k.encode(), len(v), v) for k, v in values.items()]
    return b"".join(parts) + b"END\r\n"


def test_the_command() -> None:
    assert get_packet(NAMES) == b"get a bb c\r\n"


@pytest.mark.parametrize("values", VALUES)
def test_answers(values: dict[str, bytes]) -> None:
    expected = [values.get(name) or None for name in NAMES]
    assert parse_values(answer(values), NAMES) == expected


@pytest.mark.parametrize("values", VALUES)
def test_answers_that_are_not_complete(values: dict[str, bytes]) -> None:
    raw = answer(values)
    assert all(parse_values(raw[:size], NAMES) is None for size in range(len(raw)))


@pytest.mark.parametrize("found", [NAMES, ["a", "c"], ["bb"], ["c"], []])
def test_missing_entries_do_not_need_the_slow_parser(
    found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(protocol, "_parse_slowly")
    expected = [b"1" if name in found else None for name in NAMES]
    assert parse_values(answer(dict.fromkeys(found, b"1")), NAMES) == expected


def test_flags_of_another_client() -> None:
    assert parse_values(b"VALUE a 16 1\r\n1\r\nEND\r\n", ["a"]) == [b"1"]


def test_a_name_twice() -> None:
    raw = b"VALUE a 0 1\r\n1\r\n" * 2 + b"END\r\n"
    assert parse_values(raw, ["a", "a"]) == [b"1", b"1"]


def test_a_server_without_memory() -> None:
    """The rest of the entries count as missing, as with the other commands."""
    raw = b"VALUE a 0 1\r\n1\r\nSERVER_ERROR out of memory writing get response\r\n"
    assert parse_values(raw, NAMES) == [b"1", None, None]


@pytest.mark.parametrize(
    "raw",
    [
        b"ERROR\r\n",
        b"VA 1\r\n1\r\n",
        b"VALUE a 0\r\n",
        b"VALUE a 0 -1\r\n",
        b"VALUE a 0 x\r\n",
        b"VALUE a 0 1\r\n22\r\nEND\r\n",
        b"END\r\nEND\r\n",
        answer(VALUES[0]) + b"VALUE a 0 1\r\n1\r\n",
    ],
)
def test_malformed_answers(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_values(raw, NAMES)


def test_marked_sizes() -> None:
    raw = b"NS\r\nHD\r\nHD s300\r\nHD\r\nHD\r\nHD s70\r\n"
    assert marked_sizes(raw, 2) == [300, 70]
    assert marked_sizes(raw, 1) is None
    assert all(marked_sizes(raw[:size], 2) is None for size in range(len(raw)))


@pytest.mark.parametrize(
    "raw",
    [
        b"NS\r\nNS\r\nHD s300\r\n",
        b"NS\r\nHD\r\nEN\r\n",
        b"NS\r\nHD\r\nHD s\r\n",
        b"NS\r\nHD\r\nHD s-1\r\n",
        b"SERVER_ERROR out of memory\r\nHD\r\nHD s300\r\n",
        b"NS\r\nHD\r\nHD s300\r\nHD\r\n",
    ],
)
def test_unusual_sizes(raw: bytes) -> None:
    assert marked_sizes(raw, 1) is None
