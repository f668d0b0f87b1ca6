"""Copies the existing rows of a source, a model that has mirrors, into a new mirror."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror, mirrors
from sharded_orm.contrib.mirrors.delivery import RowToDeliver, deliver
from sharded_orm.contrib.mirrors.exceptions import MirrorNotFound
from sharded_orm.contrib.mirrors.outbox import BATCH
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound


def find_mirror(name: str) -> Mirror:
    """Return the mirror with this label, such as ``photos.WrittenComment``, or with this class name.

    :raises MirrorNotFound: no mirror or several mirrors have this name.
    """
    matching = [
        mirror
        for mirror in mirrors()
        if name.lower() in (mirror.label.lower(), mirror.model.__name__.lower())
    ]
    if len(matching) == 1:
        return matching[0]
    known = [mirror.label for mirror in mirrors()]
    what = "Several mirrors have" if matching else "No mirror has"
    raise MirrorNotFound(f"{what} the name {name!r}. The mirrors are {known!r}.")


def build(mirror: Mirror, *, stopping: Callable[[], bool] = lambda: False) -> Iterator[int]:
    """Copy all rows of the source that the mirror lacks. Yield the number of copied rows so far.

    Each process that writes the source must know the mirror before the call. Then all new writes
    reach the mirror, and only older rows are missing. A row that a writer has delivered is newer,
    so it is not changed. The build can be run again after an interruption.

    Costs two reads of the source per 500 rows, and a transaction on each shard of the mirror.

    :raises Exception: the error of the first row that the mirror does not accept.
    """
    source = mirror.source
    copied = 0
    for shard in runtime.group(source.options.group).shards():
        last: Any = None
        while not stopping():
            with unbound():
                page: Any = ShardedQuerySet(source.model).using(shard.alias).uncached()
                page = page.order_by("pk")
                if last is not None:
                    page = page.filter(pk__gt=last)
                names = (source.pk.attname, source.key.attname, mirror.key.attname)
                rows = list(page.values_list(*names)[:BATCH])
            if not rows:
                break
            last = rows[-1][0]
            _copy(mirror, rows)
            copied += len(rows)
            yield copied


def _copy(mirror: Mirror, rows: list[Any]) -> None:
    # Deliver the rows with the version 0. If a row was delivered since it was read here, the mirror
    # has a higher version of it, and keeps that.
    attname = mirror.key.attname
    new = [
        RowToDeliver(pk, key, 0, {attname: frozenset([mirror_key])}, is_new=False)
        for pk, key, mirror_key in rows
        if mirror_key is not None
    ]
    for exc in deliver(new, [mirror]).values():
        raise exc
