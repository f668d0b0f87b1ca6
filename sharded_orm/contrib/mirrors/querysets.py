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

# If rows of a page differ from the source, they are repaired, and the page is read and compared
# again. After this many comparisons, the rows that still differ are only corrected in memory. This
# happens if a repair has no effect, or if other processes write the rows all the time.
_LOOKS = 3
# True while a deferred shard key is loaded in order to verify its row. The query that loads the key
# is not verified itself, because that would need the key.
_loads_key: ContextVar[bool] = ContextVar("loads_key_of_mirror", default=False)


class MirrorQuerySet(ShardedQuerySet[M]):
    """A queryset of a mirror whose ``ShardMeta`` has ``verify_reads = True``.

    When it reads instances, it also reads the rows of the source, and compares. This costs one
    query per shard of the source and page, in one round trip per node (a database server). If a row
    of the source is gone or differs, the mirror is repaired, and the query runs again. So pages are
    full, and filters and order are right for the current values. Some rows cannot be repaired now,
    for example inside a transaction. Such a row gets the source's values in memory, or is left out
    if its source is gone.

    Instances have None for the NULL of SQL and for the null of JSON. So if a JSONField of a page
    has None, one more query finds out which of the two is stored.

    Not verified are ``values()``, ``count()``, ``exists()``, aggregates and ``iterator()``. A row
    that the mirror lacks is not found, because only rows of the mirror are compared.

    Django uses the base manager of the model to load deferred fields and the objects of foreign
    keys, and for ``refresh_from_db()``. These reads are verified only if ``Meta.base_manager_name``
    names a manager that verifies.
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
            # The repair has failed, for example because a shard is down. The query must not fail
            # for that reason. So rows that the source lacks are left out, and other rows get the
            # source's values in memory.
            except Exception:
                self._leave_out(mirror, suspects, wanted)
                return
            self._read_again()

    def _nulls(self, mirror: Mirror, rows: Sequence[Any]) -> dict[Any, dict[str, Any]] | None:
        """Find out for each None in a JSON field whether the database has the NULL of SQL or the
        null of JSON. Instances have None for both.

        :returns: maps primary keys to dicts, which map attributes to None or :data:`JSON_NULL`.
            None if the page's query now finds other rows, because a value has changed meanwhile.
        """
        names = [mirror.attributes[position] for position in mirror.json_positions]
        if self.query.combinator or not any(
            row.__dict__.get(name, self) is None for row in rows for name in names
        ):
            return {}
        with uncached():
            # Run the query of the page again, with all its conditions, rather than a query for the
            # primary keys of ``rows``. A row may have changed so that it does not belong to the
            # page any more. For example, the page has the rows in which a field is the null of
            # JSON, and the field is NULL in one of them now.
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
        """Correct the instances of the page, because the mirror cannot be repaired now.

        If the source lacks some of the rows, read the page again without them. Set the source's
        values in all rows.
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
    """Return a dict that maps the primary keys of ``rows`` to pairs (shard key, values of the
    source).
    """
    if not rows:
        return {}
    # This is not None, because a system check requires this field of a mirror with
    # ``verify_reads``.
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
    # Load a deferred shard key, because it must be compared like the other values. If it differs,
    # the row belongs on another shard.
    _key_value(row, key.attname)
    loaded, known = row.__dict__, nulls.get(row.pk, {})
    stored = []
    for name, value in zip(mirror.attributes, values, strict=True):
        # A deferred field has no value to compare, so it counts as equal.
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
    """Return the value of a shard key. If it is deferred, load it without verifying the row,
    because the verification itself would need this value.
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
