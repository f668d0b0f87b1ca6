"""Read and check ``SHARDED_ORM["CACHE"]`` and ``SHARDED_ORM["ON_CACHE_FAILURE"]``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharded_orm.conf.values import flag, seconds, unknown_keys

KEYS = {
    "OBJECTS", "LISTS", "PREFIX", "TTL", "TIMEOUT", "BACKOFF", "COMMIT_WITHIN", "QUARANTINE",
    "READ", "ALSO_MARK",
}  # fmt: skip

#: Largest ``TTL`` (lifetime of a cache entry) in seconds: 15 days. Guards (see :class:`CacheOptions`) live
#: twice as long as entries, and memcached would take a lifetime of more than 30 days for a date.
MAX_TTL = 15 * 24 * 3600
_PREFIX = re.compile(r"[A-Za-z0-9_.:]{0,32}\Z")


@dataclass(frozen=True)
class CacheOptions:
    """The values of ``SHARDED_ORM["CACHE"]`` and ``SHARDED_ORM["ON_CACHE_FAILURE"]`` (Yupoo; Pinterest, P8).

    A *guard* is a record in the cache that stands for some rows, such as all rows of a shard key.
    Before its COMMIT, each write puts a *marker* into the guards of its rows, to announce the change.
    """

    #: The alias of ``CACHES`` whose servers hold objects (cached rows).
    objects: str
    #: The alias of ``CACHES`` whose servers hold cached results of queries (lists of rows, and
    #: numbers of rows). It may be the same alias as ``objects``.
    lists: str
    #: The text with which the names of all cache entries begin.
    prefix: str = ""
    #: The longest time in seconds for which a cached row is used. Entries expire a little earlier,
    #: see `kept_for()`.
    ttl: float = 3600.0
    #: Seconds to wait for one answer of a cache server.
    timeout: float = 0.25
    #: Seconds for which a cache server is not called after a failure.
    backoff: float = 2.0
    #: A write may COMMIT within this many seconds after its marker (the announcement of the write
    #: in the cache) was stored. Before a later COMMIT, a new marker is stored.
    commit_within: float = 2.0
    #: Seconds for which the library assumes that a write may still be under way. Rows are not
    #: cached while their guard (see :class:`CacheOptions`) is younger than this: the cache may have
    #: lost an earlier guard, and with it the marker of a write. If the database cannot say whether
    #: the write of an open marker still runs, the write counts as ended when the marker is older
    #: than this.
    quarantine: float = 10.0
    #: What to do if a write cannot be announced in the cache. ``"refuse"`` rolls the write back.
    #: ``"proceed"`` commits the write; then cache entries may be stale for up to ``ttl`` seconds.
    on_failure: str = "refuse"
    #: Whether this process reads and stores cache entries. If False, the process uses the cache only to
    #: announce which rows it writes.
    read: bool = True
    #: Further aliases of ``CACHES``, on whose servers writes are also announced. They are needed
    #: while the list of cache servers is changed: some processes then read from the old servers and
    #: some from the new ones.
    also_mark: tuple[str, ...] = ()


def parse_cache(setting: Mapping[Any, Any], problems: list[str]) -> CacheOptions | None:
    """Return the cache options; None if ``CACHE`` is missing or wrong.

    :param setting: the whole ``SHARDED_ORM`` dict.
    :param problems: a list to which a sentence is added for each error.
    """
    known = len(problems)
    policy = setting.get("ON_CACHE_FAILURE", "refuse")
    if policy not in ("refuse", "proceed"):
        problems.append(f"ON_CACHE_FAILURE must be 'refuse' or 'proceed', not {policy!r}")
    raw = setting.get("CACHE")
    if raw is None:
        return None
    where = "CACHE: "
    if not isinstance(raw, Mapping):
        # Show only the type of the value: the value may be a URL with a password.
        problems.append(f"CACHE must be a dict, not {type(raw).__name__}")
        return None
    problems += unknown_keys(where, raw, KEYS)
    objects = raw.get("OBJECTS")
    if not isinstance(objects, str):
        problems.append(f"{where}OBJECTS must be an alias of CACHES, not {objects!r}")
    lists = raw.get("LISTS", objects)
    if "LISTS" in raw and not isinstance(lists, str):
        problems.append(f"{where}LISTS must be an alias of CACHES, not {lists!r}")
    prefix = raw.get("PREFIX", "")
    if not isinstance(prefix, str) or not _PREFIX.match(prefix):
        problems.append(
            f"{where}PREFIX must be at most 32 letters, digits, '_', '.' and ':', not {prefix!r}"
        )
    default = CacheOptions("", "")
    ttl, timeout, backoff, commit_within, quarantine = (
        seconds(where, key, raw, usual, problems)
        for key, usual in (
            ("TTL", default.ttl),
            ("TIMEOUT", default.timeout),
            ("BACKOFF", default.backoff),
            ("COMMIT_WITHIN", default.commit_within),
            ("QUARANTINE", default.quarantine),
        )
    )
    if ttl > MAX_TTL or ttl < 1:
        problems.append(f"{where}TTL must be 1 to {MAX_TTL} seconds, not {ttl!r}")
    elif ttl < quarantine:
        # A guard (see CacheOptions) lives for twice the TTL. Its rows are cached only when the guard
        # is older than QUARANTINE. With too short a TTL, the guard could expire before it reaches
        # that age.
        problems.append(f"{where}TTL ({ttl!r}) must not be less than QUARANTINE ({quarantine!r})")
    if timeout >= commit_within:
        problems.append(
            f"{where}TIMEOUT ({timeout!r}) must be less than COMMIT_WITHIN ({commit_within!r}),"
            " which includes it"
        )
    if quarantine <= 2 * commit_within:
        problems.append(
            f"{where}QUARANTINE ({quarantine!r}) must be more than twice COMMIT_WITHIN"
            f" ({commit_within!r}): it also covers what the clocks of machines differ by"
        )
    read = flag(where, "READ", raw, True, problems)
    also_mark = raw.get("ALSO_MARK", ())
    if not isinstance(also_mark, (list, tuple)) or not all(
        isinstance(alias, str) for alias in also_mark
    ):
        problems.append(f"{where}ALSO_MARK must be a list of aliases of CACHES, not {also_mark!r}")
    if len(problems) > known:
        return None
    return CacheOptions(
        str(objects), str(lists), prefix, ttl, timeout, backoff, commit_within, quarantine, policy,
        read, tuple(also_mark),
    )  # fmt: skip
