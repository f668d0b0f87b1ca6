"""``SHARDED_ORM["CACHE"]`` and ``SHARDED_ORM["ON_CACHE_FAILURE"]``."""

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
#: memcached takes more than 30 days for a date, and a guard lives twice as long as entries.
MAX_TTL = 15 * 24 * 3600
_PREFIX = re.compile(r"[A-Za-z0-9_.:]{0,32}\Z")


@dataclass(frozen=True)
class CacheOptions:
    """``SHARDED_ORM["CACHE"]`` and ``SHARDED_ORM["ON_CACHE_FAILURE"]`` (Yupoo, P8).

    A guard is the record in the cache that announces the writes to some rows.
    """

    #: The alias of ``CACHES`` whose servers hold objects.
    objects: str
    #: The alias whose servers hold lists and counts; may be the same.
    lists: str
    #: The beginning of all names in the cache.
    prefix: str = ""
    #: Seconds that an entry lives.
    ttl: float = 3600.0
    #: Seconds that a cache server has for one answer.
    timeout: float = 0.25
    #: Seconds for which a cache server that failed is left alone.
    backoff: float = 2.0
    #: Seconds from announcing a write to its COMMIT; a later COMMIT announces the write again.
    commit_within: float = 2.0
    #: Seconds during which nothing is stored under a new guard. After as many seconds an
    #: announcement counts as dead if its writer cannot be asked.
    quarantine: float = 10.0
    #: If a write cannot be announced: ``"refuse"`` refuses the write, ``"proceed"`` writes, and
    #: entries may be stale for ``ttl`` seconds.
    on_failure: str = "refuse"
    #: False: this process announces its writes, but neither reads nor stores.
    read: bool = True
    #: More aliases whose servers get the announcements: servers that other processes read
    #: already, or still, while the list of servers changes.
    also_mark: tuple[str, ...] = ()


def parse_cache(setting: Mapping[Any, Any], problems: list[str]) -> CacheOptions | None:
    """The options; None if there is no ``CACHE`` or anything is wrong with it."""
    known = len(problems)
    policy = setting.get("ON_CACHE_FAILURE", "refuse")
    if policy not in ("refuse", "proceed"):
        problems.append(f"ON_CACHE_FAILURE must be 'refuse' or 'proceed', not {policy!r}")
    raw = setting.get("CACHE")
    if raw is None:
        return None
    where = "CACHE: "
    if not isinstance(raw, Mapping):
        # Only its type is shown: it may be a URL with a password.
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
        # A new guard would be gone before anything may be stored under it.
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
