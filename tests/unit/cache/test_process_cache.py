"""What a process remembers of lists and their rows, and how much of it."""

from __future__ import annotations

import pytest

from sharded_orm.cache.process_cache import Decoded, ListedRows, ProcessCache, kept_for

GUARD = "guard"


def rows_of(decoded: Decoded, size: int = 10, guard: bytes = b"=1\n") -> ListedRows:
    return ListedRows((guard,), decoded, ("a",), (("value",),), size, 10.0)


def kept_queries(memory: ProcessCache, decoded: Decoded, queries: str) -> str:
    return "".join(query for query in queries if memory.rows(GUARD, query, decoded, 0.0))


def test_beyond_the_limit_the_oldest_rows_are_dropped() -> None:
    memory, decoded = ProcessCache(limit=3), Decoded()
    for query in "abcad":
        memory.note_rows(GUARD, query, rows_of(decoded), is_divided=False)
    assert kept_queries(memory, decoded, "abcd") == "acd"


def test_beyond_the_most_bytes_the_oldest_rows_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, decoded = ProcessCache(), Decoded()
    monkeypatch.setattr(ProcessCache, "MOST_BYTES", 100)
    for query, size in zip("abcab", (40, 40, 20, 40, 60), strict=True):
        memory.note_rows(GUARD, query, rows_of(decoded, size), is_divided=False)
    assert kept_queries(memory, decoded, "abc") == "ab"
    # Forgotten rows do not count any more.
    kept = memory.rows(GUARD, "b", decoded, 0.0)
    assert kept is not None
    memory.forget_rows(GUARD, "b", kept)
    memory.forget_rows(GUARD, "b", kept)
    memory.note_rows(GUARD, "c", rows_of(decoded, 60), is_divided=False)
    assert kept_queries(memory, decoded, "abc") == "ac"


def test_rows_that_another_thread_has_noted_are_not_dropped() -> None:
    memory, decoded = ProcessCache(), Decoded()
    earlier = rows_of(decoded)
    memory.note_rows(GUARD, "a", earlier, is_divided=False)
    later = rows_of(decoded, guard=b"=2\n")
    memory.note_rows(GUARD, "a", later, is_divided=False)
    memory.forget_rows(GUARD, "a", earlier)
    assert memory.rows(GUARD, "a", decoded, 9.0) is later
    assert memory.rows(GUARD, "a", decoded, 10.0) is None


@pytest.mark.parametrize(
    ("ttl", "seconds"), [(3600.0, 10.0), (100.0, 10.0), (99.0, 9.0), (15.5, 1.0), (9.0, 0.0)]
)
def test_a_tenth_of_a_short_ttl(ttl: float, seconds: float) -> None:
    assert kept_for(ttl) == seconds
