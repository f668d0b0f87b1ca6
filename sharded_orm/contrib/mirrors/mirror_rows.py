"""Writes rows of a mirror on one shard. An older version never overwrites a newer one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from django.db import (
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.models import F, QuerySet

from sharded_orm import runtime
from sharded_orm.backends.missing_parts import is_missing_table
from sharded_orm.contrib.mirrors.declaration import Mirror, text_of, value_of
from sharded_orm.contrib.mirrors.exceptions import IdUsedTwice, MirrorRaced
from sharded_orm.contrib.mirrors.insert_statements import insert_version
from sharded_orm.contrib.mirrors.models import RowVersion
from sharded_orm.contrib.mirrors.source_reads import aliases_of, pks_at, rows_of_id
from sharded_orm.models.querysets.sharded import ShardedQuerySet

_writing: ContextVar[bool] = ContextVar("sharded_orm_writing_mirror", default=False)
# How often a writer tries to write rows that other processes write at the same time. An attempt
# fails if another process inserts the version of a row first. The next attempt locks this version,
# so it rarely fails.
_ATTEMPTS = 5

is_writing = _writing.get


@contextmanager
def _writing_mirror() -> Iterator[None]:
    token = _writing.set(True)
    try:
        yield
    finally:
        _writing.reset(token)


class StoredVersion(NamedTuple):
    """The version of a mirror's row, as the table of versions on the mirror's shard has it.

    :param key: the shard key of the source's row at the time of this version, as text; None if
        unknown.
    """

    number: int
    key: str | None


@dataclass(frozen=True)
class MirrorRow:
    """The state that a row of a mirror must have on one shard.

    :param source_key: the shard key of the row of the source; None if it is not known.
    :param values: the values in the order of :attr:`Mirror.attributes`; None if the row is to be
        removed from this shard.
    :param is_new: whether the shard has probably never had the row. If so, fewer statements are
        needed to write it.
    """

    pk: Any
    source_key: Any
    version: int
    values: Sequence[Any] | None
    is_new: bool = False


def write_rows(
    mirror: Mirror,
    alias: str,
    rows: Sequence[MirrorRow],
    *,
    unchanged: Mapping[Any, StoredVersion | None] | None = None,
) -> None:
    """Write ``rows`` of ``mirror`` on the shard ``alias``. Skip a row if the shard has a newer
    version of it.

    All rows are written in one transaction. The call may be repeated with the same rows. It costs
    two statements if all rows are new. Otherwise it costs a few statements, and up to two more for
    each row. If the backend can do so, the two statements for a single new row are sent in one
    packet with the COMMIT.

    :param rows: at most one for each primary key.
    :param unchanged: None for a delivery. For a repair, a dict that maps each primary key to the
        version that the shard had before the source was read. Then a row is written only if the
        shard still has this version.
    :raises MirrorRaced: in each of several attempts, other processes have written the same rows.
    :raises IdUsedTwice: the source has two rows with one of the ids.
    :raises django.db.IntegrityError: a constraint of the mirror refuses a row.
    """
    # All writers lock rows in the order of the primary keys, to avoid deadlocks.
    rows = sorted(rows, key=lambda row: _text(mirror, row))
    for attempt in range(_ATTEMPTS):
        try:
            with transaction.atomic(using=alias), _writing_mirror():
                # Insert new rows without a query for stored rows. If a row is not new, the primary
                # key of the table of versions refuses the INSERT.
                if attempt == 0 and all(row.is_new and row.values is not None for row in rows):
                    connection: Any = connections[alias]
                    # Send a single row in one packet with the COMMIT. Do not do so for several
                    # rows, because the packet might be too large for the server.
                    with connection.sent_with_commit() if len(rows) == 1 else nullcontext():
                        _insert_versions(mirror, alias, rows)
                        _insert(mirror, alias, rows)
                else:
                    _write_locked(mirror, alias, rows, unchanged)
            return
        except IntegrityError:
            if attempt == _ATTEMPTS - 1:
                raise
        except (OperationalError, ProgrammingError) as exc:
            # The table is missing, perhaps because the shard moves just now. The next attempt sends
            # the statements one by one, so that the backend can find out whether the shard moves.
            if attempt > 0 or not is_missing_table(exc):
                raise


def _write_locked(
    mirror: Mirror,
    alias: str,
    rows: Sequence[MirrorRow],
    unchanged: Mapping[Any, StoredVersion | None] | None,
) -> None:
    known = _lock_versions(mirror, alias, rows)
    if unchanged is None:
        unversioned = [row for row in rows if _text(mirror, row) not in known]
        rows = [row for row in rows if _text(mirror, row) in known]
        rows += _of_their_keys(mirror, alias, unversioned)
    newer: list[MirrorRow] = []
    for row in rows:
        stored_version = known.get(_text(mirror, row))
        if unchanged is not None:
            if stored_version == unchanged[row.pk]:
                newer.append(row)
        elif stored_version is None or stored_version.key in (None, _key_text(mirror, row)):
            if stored_version is None or row.version > stored_version.number:
                newer.append(row)
        elif (decided := _decided_by_source(mirror, alias, row, stored_version.key)) is not None:
            newer.append(decided)
    _insert_versions(mirror, alias, [row for row in newer if _text(mirror, row) not in known])
    for row in newer:
        if _text(mirror, row) in known:
            versions = _versions(mirror, alias, [row])
            versions.update(version=row.version, key=_key_text(mirror, row))
    gone = [row.pk for row in newer if row.values is None]
    present = [row for row in newer if row.values is not None]
    own_key = mirror.options.key
    assert own_key is not None
    position = mirror.attributes.index(own_key.attname)
    pks = [row.pk for row in present]
    stored = dict(_rows(mirror, alias).filter(pk__in=pks).values_list("pk", own_key.attname))
    for row in present:
        assert row.values is not None
        if row.pk in stored and stored[row.pk] != row.values[position]:
            # The shard key of the mirror's row has changed. UPDATE cannot change a shard key, so
            # the row is deleted and inserted again.
            gone.append(row.pk)
            del stored[row.pk]
    if gone:
        doomed: Any = _rows(mirror, alias).filter(pk__in=gone)
        doomed._raw_delete(alias)
    for row in present:
        if row.pk in stored:
            assert row.values is not None
            fixed = {own_key.attname, mirror.model._meta.pk.attname}
            pairs = zip(mirror.attributes, row.values, strict=True)
            values = {name: value for name, value in pairs if name not in fixed}
            if values:
                _rows(mirror, alias).filter(pk=row.pk).update(**values)
    _insert(mirror, alias, [row for row in present if row.pk not in stored])


def _decided_by_source(
    mirror: Mirror, alias: str, row: MirrorRow, stored_key: str
) -> MirrorRow | None:
    """Return the row to write if the shard has a version of the row from another shard key of the
    source.

    This happens if, for example, a row of the source was deleted under one shard key, and created
    with the same id under another. Each shard of the source numbers its writes by itself, so the
    two versions cannot be compared. The source is read instead, to find the row that exists now.
    The caller holds the lock of the stored version, so no other delivery writes the row meanwhile.

    :returns: None if the row on the shard is to stay as it is.
    :raises IdUsedTwice: the source has rows with this id under both keys.
    """
    source = mirror.source
    keys = value_of(source.key, stored_key), row.source_key
    rows = rows_of_id(mirror, row.pk, keys)
    position = mirror.names.index(mirror.key.attname)
    homes = aliases_of(mirror, {values[position] for values in rows.values()})
    former, own = (
        values if (values := rows.get(key)) and homes.get(values[position]) == alias else None
        for key in (text_of(source.key, key) for key in keys)
    )
    if own is None:
        return None
    if former is not None:
        raise IdUsedTwice(
            f"{source.model.__name__}(pk={row.pk!r}) exists under the shard keys {keys[0]!r} and"
            f" {keys[1]!r}, and {mirror.label} can have only one row with this id. It keeps that"
            f" of {keys[0]!r}. Delete one of the two. If a relay has given up meanwhile, run 'manage.py"
            " mirrors relay --once --retry-dead'."
        )
    return replace(row, values=own)


def _of_their_keys(mirror: Mirror, alias: str, rows: Sequence[MirrorRow]) -> list[MirrorRow]:
    """Return those of ``rows`` that may be written although the shard has no versions of them.

    If a shard key of the mirror moves, its rows move without their versions. So a row that is there
    may come from another shard key of the source than the row to be written. The source is read
    then, as in :func:`_decided_by_source`. If another delivery writes the row meanwhile, this one
    cannot insert its version, and is repeated.

    :raises IdUsedTwice: the source has rows with one of the ids under two keys.
    """
    if not rows or not runtime.strategy(mirror.options.group).moves_keys:
        return list(rows)
    there = _rows(mirror, alias).filter(pk__in=[row.pk for row in rows])
    if (own := mirror.own_source_key) is None:
        # The rows do not say where they come from. So let no deletion remove a row that the source
        # has under any key.
        doomed = {row.pk for row in rows if row.values is None}
        present = set(there.filter(pk__in=doomed).values_list("pk", flat=True)) if doomed else set()
        kept = pks_at(mirror, alias, present) if present else set()
        return [row for row in rows if row.pk not in doomed & kept]
    keys = {pk: text_of(mirror.source.key, key) for pk, key in there.values_list("pk", own.attname)}
    decided = [
        row
        if keys.get(row.pk) in (None, _key_text(mirror, row))
        else _decided_by_source(mirror, alias, row, keys[row.pk])
        for row in rows
    ]
    return [row for row in decided if row is not None]


def stored_versions(
    mirror: Mirror, alias: str, pks: Iterable[Any]
) -> dict[Any, StoredVersion | None]:
    """Return a dict that maps primary keys to the versions of rows on the shard ``alias``.

    The version is None for a row that the shard has never had.
    """
    texts = {pk: text_of(mirror.source.pk, pk) for pk in pks}
    stored = _version_rows(alias).filter(mirror=mirror.label, row__in=texts.values())
    known = _by_row(stored)
    return {pk: known.get(text) for pk, text in texts.items()}


def _insert(mirror: Mirror, alias: str, rows: Sequence[MirrorRow]) -> None:
    objs = [
        mirror.model(**dict(zip(mirror.attributes, row.values, strict=True)))
        for row in rows
        if row.values is not None
    ]
    if objs:
        # Use ShardedQuerySet, because it refuses rows whose shard key does not lead to this shard.
        ShardedQuerySet(mirror.model, using=alias).using(alias).bulk_create(objs)


def _rows(mirror: Mirror, alias: str) -> QuerySet[Any]:
    return QuerySet(mirror.model, using=alias)


def _version_rows(alias: str) -> QuerySet[RowVersion]:
    return QuerySet(RowVersion, using=alias)


def _text(mirror: Mirror, row: MirrorRow) -> str:
    return text_of(mirror.source.pk, row.pk)


def _key_text(mirror: Mirror, row: MirrorRow) -> str | None:
    key = row.source_key
    return None if key is None else text_of(mirror.source.key, key)


def _versions(mirror: Mirror, alias: str, rows: Iterable[MirrorRow]) -> QuerySet[RowVersion]:
    texts = [_text(mirror, row) for row in rows]
    return _version_rows(alias).filter(mirror=mirror.label, row__in=texts)


def _insert_versions(mirror: Mirror, alias: str, rows: Sequence[MirrorRow]) -> None:
    try:
        if len(rows) == 1:
            (row,) = rows
            text, key = _text(mirror, row), _key_text(mirror, row)
            insert_version(alias, mirror.label, text, key, row.version)
        elif rows:
            _version_rows(alias).bulk_create(
                RowVersion(
                    mirror=mirror.label,
                    row=_text(mirror, row),
                    key=_key_text(mirror, row),
                    version=row.version,
                )
                for row in rows
            )
    except IntegrityError as exc:
        # A concurrent writer has inserted a version of one of the rows. The error cannot come from
        # a constraint of the mirror itself, whose rows are written by a later statement.
        raise MirrorRaced(
            f"Others write the same rows of {mirror.label} on {alias!r}: {exc}"
        ) from exc


def _lock_versions(
    mirror: Mirror, alias: str, rows: Sequence[MirrorRow]
) -> dict[str, StoredVersion]:
    """Lock and return the stored versions of ``rows``, keyed by the text of the primary key."""
    versions = _versions(mirror, alias, rows)
    if connections[alias].features.has_select_for_update:
        versions = versions.select_for_update().order_by("row")
    else:
        # This database, such as SQLite, has no row locks. Begin with a write that changes nothing.
        # If a transaction began with a read, and another one wrote meanwhile, the first write would
        # fail.
        versions.update(version=F("version"))
    return _by_row(versions)


def _by_row(versions: QuerySet[RowVersion]) -> dict[str, StoredVersion]:
    found = versions.values_list("row", "version", "key")
    return {row: StoredVersion(version, key) for row, version, key in found}
