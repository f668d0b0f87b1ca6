"""Replies of Redis: whole ones are parsed, parts of one wait, anything else is refused."""

from __future__ import annotations

import pytest

from sharded_orm.cache.stores.redis.protocol import (
    RedisScript,
    Refusal,
    by_digest,
    pack,
    parse_replies,
)
from sharded_orm.cache.stores.sockets import ProtocolError

ANSWER = (
    b"+OK\r\n:-7\r\n$-1\r\n$6\r\nMN\r\n :\r\n-NOSCRIPT no 'x'\r\n*3\r\n$1\r\na\r\n$-1\r\n$0\r\n\r\n"
)


def test_each_kind_of_reply() -> None:
    replies = parse_replies(ANSWER, 6)
    assert replies is not None
    refusal = replies.pop(4)
    assert replies == [b"OK", -7, None, b"MN\r\n :", [b"a", None, b""]]
    assert isinstance(refusal, Refusal)
    assert refusal.code == "NOSCRIPT"


def test_an_answer_that_goes_on_is_not_parsed() -> None:
    for end in range(len(ANSWER)):
        assert parse_replies(ANSWER[:end], 6) is None


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n:1\r\n",  # one reply too many
        b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b":1a\r\n",
        b"$2\r\nlonger\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*1\r\n$-1\r\n",
        b"*1\r\n-ERR\r\n",
        # Of version 3 of the protocol:
        b"#t\r\n",
        b"_\r\n#f\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b",1.5\r\n",
    ],
)
def test_anything_else_is_refused(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_replies(answer, 1)


@pytest.mark.parametrize("before", [b"", b"+OK\r\n", b":1\r\n$-1\r\n-ERR *1\r\n"])
def test_no_room_is_made_for_values_that_nobody_asked_for(before: bytes) -> None:
    with pytest.raises(ProtocolError, match="too many values"):
        parse_replies(before + b"*4294967295\r\n", 9)


def test_a_refusal_without_a_word_has_a_code_all_the_same() -> None:
    replies = parse_replies(b"-\r\n", 1)
    assert replies is not None
    assert replies[0].code == "ERR"


def test_names_get_a_prefix() -> None:
    script = RedisScript(b"return 1")
    packet = pack([by_digest((script, "name", b"x")), (b"GET", b"plain")], "word:")
    assert packet == (
        b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$9\r\nword:name\r\n$1\r\nx\r\n"
        b"*2\r\n$3\r\nGET\r\n$5\r\nplain\r\n" % script.digest
    )
