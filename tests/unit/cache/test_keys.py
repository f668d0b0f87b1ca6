"""Names of entries: two values never give the same name, and every server accepts the name."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.cache.keys import MAX_LENGTH, CachedType, Scope, fit, node_index, token

PHOTO = CachedType("photos.Photo", sharded=True, fingerprint="01234567")
TAG = CachedType("photos.Tag", sharded=False, fingerprint="01234567")
NAME = re.compile(r"[!-~]{1,250}")

texts = st.text(max_size=100) | st.text("-~%@ revisonlt.0\n", max_size=12)
tokens = texts.map(token)


def test_names_of_the_published_pattern() -> None:
    album = Scope(PHOTO, "shard7", token(1), token(20))
    assert album.guards == (
        "photos.Photo-@shard7-revision",
        "photos.Photo-1-revision",
        "photos.Photo-1-20-revision",
    )
    assert album.home == 1
    assert album.object_name(token(10001)) == "photos.Photo-1-10001"
    assert album.list_name("query", "revision") == "photos.Photo-list-1-query-revision"
    tags = Scope(TAG, TAG.name, isolate=token("a"))
    assert tags.guards == ("photos.Tag-revision", "photos.Tag-a-revision")
    assert tags.home == 0
    assert tags.object_name("5") == "photos.Tag-5"
    assert tags.list_name("query", "revision") == "photos.Tag-list-query-revision"
    assert Scope(PHOTO, "shard7").guards == ("photos.Photo-@shard7-revision",)


def test_a_scope_of_a_whole_shard_has_no_objects() -> None:
    table = Scope(PHOTO, "shard7")
    with pytest.raises(ValueError, match="shard key"):
        table.object_name("1")
    with pytest.raises(ValueError, match="shard key"):
        table.list_name("query", "revision")
    with pytest.raises(ValueError, match="isolate"):
        Scope(PHOTO, "shard7", None, "20")


@given(texts)
def test_tokens_are_short_and_plain(text: str) -> None:
    assert re.fullmatch(r"[0-9A-Za-z_.%]{1,64}|~[0-9a-f]{32}", token(text))
    assert token(text) not in ("revision", "list", "*")


@pytest.mark.parametrize("strategy", [
    texts,
    st.integers(),
    st.binary(max_size=80),
    st.uuids(),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    st.decimals(allow_nan=False),
    st.floats(allow_nan=False),
], ids=["text", "integer", "binary", "uuid", "date", "datetime", "decimal", "float"])  # fmt: skip
@given(st.data())
def test_tokens_of_one_field_are_equal_where_the_values_are(
    strategy: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    a, b = data.draw(strategy), data.draw(strategy)
    if isinstance(a, datetime) and (a.tzinfo is None) != (b.tzinfo is None):
        return
    assert (token(a) == token(b)) == (a == b)


def test_equal_values_have_one_token() -> None:
    class Size(IntEnum):
        SMALL = 1

    class Kind(str, Enum):  # noqa: UP042 -- its str() is "Kind.CAT", and that is no key
        CAT = "cat"

    moment = datetime(2020, 5, 1, 12, tzinfo=UTC)
    assert token(moment) == token(moment.astimezone(timezone(timedelta(hours=5))))
    assert token(datetime(2020, 5, 1)) != token(date(2020, 5, 1))
    assert token(Decimal("1")) == token(Decimal("1.00")) == token(Decimal("1E0"))
    assert token(Decimal("-0.0")) == token(Decimal(0))
    exact = Decimal("1.0000000000000000000000000000000000001")
    assert token(exact) != token(Decimal(1))
    assert token(0.0) == token(-0.0)
    assert token(Size.SMALL) == token(1) == token(True)
    assert token(Kind.CAT) == token("cat")
    assert token(memoryview(b"ab")) == token(b"ab")
    assert token(UUID(int=5)) == token(UUID(int=5).hex)  # as drivers return them


@given(texts, texts, texts, texts)
def test_names_of_different_things_differ(a: str, b: str, c: str, d: str) -> None:
    def names(type: CachedType, key: str | None, rest: str) -> dict[str, Any]:
        place = "s" if type.sharded else type.name
        scope = Scope(type, place, key)
        isolated = Scope(type, place, key, rest)
        return {
            scope.object_name(rest): ("object", key, rest),
            scope.list_name("q", rest): ("list", key, rest),
            **{guard: ("guard", guard) for guard in isolated.guards[:-1]},
            isolated.guards[-1]: ("isolated", key, rest),
        }

    for type in (PHOTO, TAG):
        one = names(type, token(a) if type.sharded else None, token(b))
        other = names(type, token(c) if type.sharded else None, token(d))
        assert len(one) == (5 if type.sharded else 4)
        for name in one.keys() & other.keys():
            assert one[name] == other[name]


@given(texts, texts, texts)
def test_every_server_takes_every_name(prefix: str, value: str, place: str) -> None:
    type = CachedType(f"{prefix}photos.Photo", sharded=True, fingerprint="0")
    scope = Scope(type, place, token(value), token(value))
    for name in (*scope.guards, scope.object_name(token(value)), scope.list_name("q" * 99, "r")):
        assert NAME.fullmatch(name)


def test_types_keep_their_names_apart() -> None:
    assert CachedType("a:x.Фото", True, "0").name == "a:x.%D0%A4%D0%BE%D1%82%D0%BE"
    assert CachedType("a b", True, "0").name != CachedType("a~b", True, "0").name
    assert CachedType("my-site:photos.Photo", True, "0").name == "my-site:photos.Photo"


def test_long_names_keep_apart() -> None:
    one, other = "x" * 300 + "1", "x" * 300 + "2"
    assert len(fit(one)) <= MAX_LENGTH
    assert fit(one) != fit(other)
    assert fit("x" * MAX_LENGTH) == "x" * MAX_LENGTH


def test_a_place_never_changes_its_server() -> None:
    assert [node_index(f"shard{n}", 3) for n in range(8)] == [2, 0, 0, 0, 2, 1, 0, 1]
    assert node_index("shard1", 1) == 0
    assert {node_index(f"shard{n}", 3) for n in range(50)} == {0, 1, 2}
