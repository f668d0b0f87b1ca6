"""Reads and a write by hand: the least code that does what can be noticed of them.

It finds the shard, looks whether statements are logged or wrapped, leases a session, sends the same statement
and makes the same instance. So it shows which part of a plan's time a better plan could still save. MariaDB
only.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.models.base import ModelState
from django.db.models.signals import post_init, post_save, pre_init, pre_save

from sharded_orm import runtime
from sharded_orm.backends.session_mode import SessionMode
from tests.benchmarks.models import Photo

_COLUMNS = (
    "`photo`.`photo_id`, `photo`.`user_id`, `photo`.`title`, `photo`.`posted_at`, `photo`.`stars`"
)
_NAMES = ("photo_id", "user_id", "title", "posted_at", "stars")
_GET = f"SELECT {_COLUMNS} FROM `photo` WHERE (`photo`.`photo_id` = %s AND `photo`.`user_id` = %s) LIMIT 21"
_PAGE = f"SELECT {_COLUMNS} FROM `photo` WHERE `photo`.`user_id` = %s LIMIT 20"
_EXISTS = "SELECT 1 AS `a` FROM `photo` WHERE `photo`.`user_id` = %s LIMIT 1"
_COUNT = "SELECT COUNT(*) AS `__count` FROM `photo` WHERE `photo`.`user_id` = %s"
_FIRST = f"SELECT {_COLUMNS} FROM `photo` WHERE `photo`.`user_id` = %s ORDER BY `photo`.`photo_id` ASC LIMIT 1"
_IDS = "SELECT `photo`.`photo_id` AS `photo_id` FROM `photo` WHERE `photo`.`user_id` = %s LIMIT 20"
_SAVE = "UPDATE `photo` SET `title` = %s, `posted_at` = %s, `stars` = %s WHERE (`photo`.`user_id` = %s AND `photo`.`photo_id` = %s)"


def _sent(connection: Any, sql: str, parameters: tuple[Any, ...]) -> Any:
    """Send a statement on a leased session; return its rows, or None and how many it has changed."""
    virtual = connection.connection
    if (
        virtual.mode is not SessionMode.FREE
        or connection.queries_logged
        or next(reversed(connection.execute_wrappers), None) is not None
    ):
        raise NotImplementedError
    pool = virtual.pool
    session = pool.lease()
    if session.schema != virtual.schema:
        session.run(virtual.use)
    session.schema = None
    session.query(session.bind(sql, parameters))
    result = session.store_result()
    rows = session.affected_rows() if result is None else result.fetch_row(0, 0)
    session.schema = virtual.schema
    pool.release(session)
    return rows


def _read(sql: str, user: int, *others: int) -> tuple[Any, Any]:
    shard = runtime.locate("photos", user)
    assert shard is not None
    connection: Any = connections[shard.alias]
    return connection, _sent(connection, sql, (*others, user))


def _instances(sql: str, user: int, *others: int) -> list[Photo]:
    connection, rows = _read(sql, user, *others)
    if pre_init.receivers or post_init.receivers:
        raise NotImplementedError
    zone, alias, new, photos = connection.timezone, connection.alias, object.__new__, []
    for row in rows:
        photo = new(Photo)
        photo._state = state = ModelState()
        state.adding, state.db = False, alias
        attributes = photo.__dict__
        attributes.update(zip(_NAMES, row, strict=True))
        posted_at = attributes["posted_at"]
        attributes["posted_at"] = datetime.combine(posted_at, posted_at.time(), zone)
        photos.append(photo)
    return photos


def save(photo: Photo) -> None:
    """Do what ``photo.save()`` does for a stored row that nobody observes."""
    if pre_save.receivers or post_save.receivers:
        raise NotImplementedError
    connection: Any = connections[str(photo._state.db)]
    assert runtime.locate("photos", photo.user_id) is not None
    posted_at = connection.ops.adapt_datetimefield_value(photo.posted_at)
    values = (photo.title, posted_at, photo.stars, photo.user_id, photo.pk)
    if not _sent(connection, _SAVE, values):
        raise NotImplementedError


#: The names of :data:`tests.benchmarks.plans.READS` that are read by hand, too.
READS: dict[str, Callable[[int, int], object]] = {
    "get(user_id=, pk=)": lambda user, pk: _instances(_GET, user, pk)[0],
    "filter(user_id=)[:20]": lambda user, pk: _instances(_PAGE, user),
    "exists()": lambda user, pk: bool(_read(_EXISTS, user)[1]),
    "count()": lambda user, pk: _read(_COUNT, user)[1][0][0],
    "first()": lambda user, pk: _instances(_FIRST, user)[0],
    "values_list(flat=True)[:20]": lambda user, pk: [row[0] for row in _read(_IDS, user)[1]],
}
