"""Querysets of mirrors that compare the rows that they have read with the rows of the source
(Yupoo, Y6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Self

from django.db.models import Manager, Q
from django.db.models.query import ModelIterable

from sharded_orm.cache.request_cache import uncached
from sharded_orm.contrib.mirrors.declaration import Mirror, declarations
from sharded_orm.contrib.mirrors.differences import Suspect, mend
from sharded_orm.contrib.mirrors.source_reads import JSON_NULL, are_null, is_same, source_rows
from sharded_orm.models.moves.confirmation import in_transaction
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.type_variables import M

# Rows are compared at most this many times. After a comparison with differences, the rows are
# repaired, read again and compared again. Then there are differences only if rows cannot be
# repaired, or are written all the time.
_LOOKS = 3
# Whether a deferred shard key is being loaded, to verify its row.
_loads_key: ContextVar[bool] = ContextVar("loads_key_of_mirror", default=False)


class MirrorQuerySet(ShardedQuerySet[M]):
    """A queryset of a mirror whose ``ShardMeta`` has ``verify_reads = True``.

    When it reads instances, it also reads their rows of the source: one query per source shard and
    page, in one round trip per node (a database server). If a row of the source is gone or differs,
    the mirror is repaired, and the query runs again. So pages are full, and filters and order are
    right for the current values. A row that cannot be repaired now, such as inside a transaction,
    gets the source's values, or is left out if its source is gone.

    If a row has None in a JSONField, one more query of the page finds out whether it is the NULL of
    SQL or the null of JSON. Instances have None for both.

    Not verified: ``values()``, ``count()``, ``exists()``, aggregates and ``iterator()``. Django reads
    deferred fields, ``refresh_from_db()`` and the rows of foreign keys by the base manager of the
    model. It verifies only if ``Meta.base_manager_name`` names a manager that does. Reading the
    mirror cannot show rows that it lacks.
    """

    _is_verified = False

    def _fetch_all(self) -> None:
        super()._fetch_all()
        mirror = declarations().get(self.model._meta.concrete_model)
        if (
            self._is_verified
            or _loads_key.get()
            or not isinstance(mirror, Mirror)
            or not mirror.verify_reads
            or not issubclass(self._iterable_class, ModelIterable)
        ):
            return
        self._is_verified = True
        for look in range(_LOOKS):
            rows: Sequence[Any] = self._result_cache or []
            is_last = look == _LOOKS - 1
            nulls = self._nulls(mirror, rows)
            if nulls is None and not is_last:
                self._read_again()
                continue
            wanted = _wanted(mirror, rows)
            suspects = [
                _suspect(mirror, row) for row in rows if _differs(mirror, row, wanted, nulls or {})
            ]
            if not suspects:
                return
            if is_last or _is_in_transaction(mirror):
                self._leave_out(mirror, suspects, wanted)
                return
            try:
                mend(mirror, suspects)
            # A row cannot be repaired, because a shard is down or refuses the row. So leave wrong
            # rows out, or give them the source's values in memory only.
            except Exception:
                self._leave_out(mirror, suspects, wanted)
                return
            self._read_again()

    def _nulls(self, mirror: Mirror, rows: Sequence[Any]) -> dict[Any, dict[str, Any]] | None:
        """For each JSON field that is None in an instance, return its null: NULL of SQL or null of
        JSON.

        :returns: the nulls by primary key and attribute. None if the page's query now finds other
            rows, because a null has changed meanwhile.
        """
        names = [mirror.attributes[position] for position in mirror.json_positions]
        if self.query.combinator or not any(
            row.__dict__.get(name, self) is None for row in rows for name in names
        ):
            return {}
        with uncached():
            # Run the page's query again, and not a query for the primary keys of ``rows``. The
            # query may have a condition on a null, so a row whose null has changed may not belong
            # to the page any more.
            page = list(self._chain().values_list("pk", *are_null(names)))
        if [pk for pk, *_ in page] != [row.pk for row in rows]:
            return None
        return {
            pk: {name: None if null else JSON_NULL for name, null in zip(names, nulls, strict=True)}
            for pk, *nulls in page
        }

    def _read_again(self) -> None:
        self._result_cache, self._prefetch_done = None, False
        with uncached():
            super()._fetch_all()

    def _leave_out(
        self, mirror: Mirror, suspects: Sequence[Suspect], wanted: dict[Any, Any]
    ) -> None:
        """Read the page again. Leave out rows that the source lacks, and set the source's values in
        the other rows.
        """
        position = mirror.names.index(mirror.key.attname)
        gone = [
            suspect.pk
            for suspect in suspects
            if suspect.pk not in wanted
            or wanted[suspect.pk][1][position] not in suspect.mirror_keys
        ]
        if gone:
            others = self._without(gone)
            with uncached():
                others._fetch_all()
            self._result_cache = others._result_cache
            wanted = wanted | _wanted(mirror, self._result_cache or [])
        for row in self._result_cache or []:
            if row.pk in wanted:
                _, values = wanted[row.pk]
                loaded = row.__dict__
                loaded.update(
                    (name, None if value is JSON_NULL else value)
                    for name, value in zip(mirror.attributes, values, strict=True)
                    if name in loaded
                )

    def _without(self, pks: Sequence[Any]) -> Self:
        clone = self._chain()
        # exclude() refuses a sliced queryset, so add the condition to the query. The slice is then
        # taken after the rows are excluded.
        clone.query.add_q(~Q(pk__in=pks))
        clone._is_verified = True
        return clone


def _wanted(mirror: Mirror, rows: Sequence[Any]) -> dict[Any, Any]:
    """Return the shard key and values that the source has for ``rows``, by primary key."""
    if not rows:
        return {}
    # Never None here: a system check requires this field of mirrors with verified reads.
    assert mirror.own_source_key is not None
    attname = mirror.own_source_key.attname
    with uncached():
        return source_rows(mirror, {row.pk: _key_value(row, attname) for row in rows})


def _differs(
    mirror: Mirror, row: Any, wanted: dict[Any, Any], nulls: dict[Any, dict[str, Any]]
) -> bool:
    if row.pk not in wanted:
        return True
    _, values = wanted[row.pk]
    key = mirror.options.key
    assert key is not None
    # Load the shard key if it is deferred: rows with different shard keys are different rows.
    _key_value(row, key.attname)
    loaded, known = row.__dict__, nulls.get(row.pk, {})
    stored = []
    for name, value in zip(mirror.attributes, values, strict=True):
        # A deferred value counts as equal to the source's value.
        own = loaded.get(name, value)
        if own is None:
            own = known.get(name, value if value is JSON_NULL else None)
        stored.append(own)
    return not is_same(stored, values, mirror.json_positions)


def _suspect(mirror: Mirror, row: Any) -> Suspect:
    key, own = mirror.options.key, mirror.own_source_key
    assert key is not None and own is not None
    aliases = frozenset([str(row._state.db)])
    return Suspect(
        row.pk,
        _key_value(row, own.attname),
        frozenset([_key_value(row, key.attname)]),
        aliases,
    )


def _key_value(row: Any, attname: str) -> Any:
    """Return the value of a shard key, which is loaded if it is deferred.

    The value is not verified then, because its verification would need the value.
    """
    token = _loads_key.set(True)
    try:
        return getattr(row, attname)
    finally:
        _loads_key.reset(token)


def _is_in_transaction(mirror: Mirror) -> bool:
    groups = {mirror.options.group, mirror.source.options.group}
    return any(map(in_transaction, groups))


MirrorManager: Callable[[], Manager[Any]] = Manager.from_queryset(
    MirrorQuerySet, class_name="MirrorManager"
)
"""The manager class of mirrors with ``verify_reads = True``."""
