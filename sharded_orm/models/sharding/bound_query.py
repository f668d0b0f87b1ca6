"""The part of a query class that handles bound keys. It stores them, and filters queries by them.

The bound key is the shard key that a ``with bound()`` block sets for all queries in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from django.db.models import Q
from django.db.models.expressions import Col, ResolvedOuterRef
from django.db.models.lookups import Exact
from django.db.models.sql import Query
from django.db.models.sql.where import AND, WhereNode

from sharded_orm.exceptions import BoundKeyMismatch
from sharded_orm.models.sharding.bound_key import EXEMPT, BoundKey, key_in_force
from sharded_orm.models.sharding.expressions import (
    columns,
    nested_queries,
    required_conditions,
)
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.routing.where_clause import compared_columns, is_equality, plain_values

_TOO_LATE = (
    "was built outside of the block and can no longer be filtered. Build it inside, or leave the key"
    " with sharded_orm.unbound()"
)


class BoundKeyQuery(Query):
    """A query that remembers the shard key that was bound when the query was built.

    A ``with bound()`` block binds a key. The condition on this key is added only when the query is
    run: :meth:`with_bound_key` then returns a copy with the condition. So until then, ``scatter()``
    can make it a query for all keys.
    """

    #: The key that was bound when the query was built or first evaluated. None if no key was bound
    #: then. :data:`EXEMPT` if the query is meant for all keys.
    bound_key: BoundKey | None = None
    #: True if the only limit of the query is the one row of :meth:`exists`. Such a query can still
    #: be filtered by the bound key. A query with any other limit is a slice, which cannot be
    #: filtered.
    is_limited_by_exists = False

    def take_bound_key(self) -> None:
        """Store in the query the shard key that ``bound()`` has set now.

        :raises BoundKeyMismatch: the query has stored a different key before. Or the query was
            built outside of the ``bound()`` block, and no condition on the key can be added any
            more.
        """
        if self.model is None or (key := key_in_force(self.model)) is None:
            return
        if self.bound_key is None:
            self._take_late(key)
        # setdefault() is atomic. Two threads may evaluate the same queryset while different keys
        # are bound. Then one of them gets the error below.
        held = self.__dict__.setdefault("bound_key", key)
        if held not in (key, EXEMPT):
            raise BoundKeyMismatch(
                f"This query of {self.model.__name__} was built under {held}, and {key} is in force."
                " Build it inside the block that evaluates it."
            )

    def _take_late(self, key: BoundKey) -> None:
        """Store the bound key also in the parts of a union and in the subqueries.

        If the query was built outside of the ``bound()`` block, they have not stored the key yet.
        :meth:`take_bound_key` also calls this method for a new query. That has no effect, because a
        new query has no parts.
        """
        if self.combined_queries:
            self.combined_queries = tuple(map(_taken, self.combined_queries))
        if (
            self.is_sliced
            and not self.is_limited_by_exists
            and (self.combinator or self.lacks(key))
        ):
            raise BoundKeyMismatch(
                f"A slice of a query of {self.model.__name__} {_TOO_LATE}. ({key} is in force.)"  # type: ignore[union-attr]  # the model is not None here
            )
        if self.where.children or self.annotations:
            self._take_late_in_subqueries()

    def _take_late_in_subqueries(self) -> None:
        subqueries = {nested.query for nested in nested_queries(self, trusted=True)}
        taken = {query: _taken(query) for query in subqueries}
        replacements = {query: copy for query, copy in taken.items() if copy is not query}
        if not replacements:
            return
        where: Any = self.where
        self.where = where.replace_expressions(replacements)
        self.annotations = {
            name: annotation.replace_expressions(replacements)  # type: ignore[arg-type]  # missing in Django's type stubs
            for name, annotation in self.annotations.items()
        }
        if replacements.keys() & {nested.query for nested in nested_queries(self, trusted=True)}:
            raise BoundKeyMismatch(
                f"A subquery in a query of {self.model.__name__} {_TOO_LATE}."  # type: ignore[union-attr]  # the model is not None here
            )

    def with_bound_key(self) -> Self:
        """Return the query to be run: this query, or a copy that is also filtered by the bound key.

        The bound key is the shard key that was set by ``bound()`` when the query was built.

        :raises BoundKeyMismatch: a condition of the query contains a key that is not the bound key.
        """
        key = self.bound_key
        if key is None or key is EXEMPT or key == EXEMPT:
            return self
        if self.combinator:
            parts = [_filtered(part) for part in self.combined_queries]
            if all(map(_is_same, parts, self.combined_queries)):
                return self
            copy: Self = self.clone()  # type: ignore[assignment]  # the copy is of this class
            copy.combined_queries = tuple(parts)
            return copy
        if not self.lacks(key) or self._starts_at_outer_row():
            return self
        copy = self.clone()  # type: ignore[assignment]  # the copy is of this class
        copy.add_q(Q((key.name, key.value)))
        return copy

    def _starts_at_outer_row(self) -> bool:
        """Return whether Django has removed the table of :attr:`model` from this subquery.

        For ``Photo.objects.exclude(comments__text="a")``, Django makes a subquery on photos, and
        then removes the table of photos from it, in ``Query.trim_start()``. The subquery then
        begins at the comments, so it has no column with the photo's shard key, and cannot be
        filtered by it.

        It need not be filtered if a condition ties the comments to a photo of the outer query,
        which is filtered by the key. Return False if there is no such condition.
        """
        tables: dict[str, Any] = self.alias_map
        if len(tables) < 2:
            return False
        # Find the first table that is in the SQL. Django leaves out tables that have no references.
        # If the query is not compiled yet, perhaps no table has references. Then ``first`` is None.
        first = next((alias for alias in tables if self.alias_refcount[alias]), None)
        if first is None or first == self.base_table or tables[first].parent_alias is not None:
            return False
        return any(
            isinstance(lookup, Exact)
            and [column.alias for column in columns(lookup.lhs)] == [first]
            and self._is_of_outer_row(lookup.rhs)
            for lookup in required_conditions(self.where)
        )

    def _is_of_outer_row(self, compared: Any) -> bool:
        # A reference to the outer row is at first a ResolvedOuterRef. When Django resolves the
        # subquery, it replaces the reference by a column of a table that only the outer query has.
        return isinstance(compared, ResolvedOuterRef) or (
            type(compared) is Col and compared.alias not in self.alias_map
        )

    def lacks(self, key: BoundKey) -> bool:
        """Return whether no condition limits the query to rows with the shard key ``key``.

        :param key: the bound key, which ``bound()`` has set.
        :raises BoundKeyMismatch: a condition of the query contains a key that is not ``key``.
        """
        if self.combinator or not self.where.children:
            return True
        lacks = True
        for path, values, required in self._named_keys(self.where):
            if any(value != key.value for value in values):
                raise BoundKeyMismatch(
                    f"This query of {self.model.__name__} names the shard key {path} in"  # type: ignore[union-attr]  # the model is not None here
                    f" {values!r}, and {key} is in force. Leave the condition out, or leave the key"
                    " with sharded_orm.unbound() or scatter()."
                )
            lacks = lacks and not (required and path == key.name)
        return lacks

    def _named_keys(
        self, node: WhereNode, *, required: bool = True, denied: bool = False
    ) -> Iterator[tuple[str, list[Any], bool]]:
        """Yield the conditions in ``node`` that compare the shard key with values.

        Each is a tuple (path, values, is_required), such as ``("owner_id", [7], True)``. The path
        is the name of the key for ``filter()``, as in :attr:`BoundKey.name`. ``is_required`` is
        True if all rows of the query must meet the condition, and False under an OR, for example.
        Conditions under a NOT are left out.
        """
        denied = denied != node.negated
        required = (
            required and not node.negated and (node.connector == AND or len(node.children) == 1)
        )
        child: Any
        for child in node.children:
            if isinstance(child, WhereNode):
                yield from self._named_keys(child, required=required, denied=denied)
            elif not denied and is_equality(child):
                for column, compared in compared_columns(child):
                    if (path := self._path_to_key(column)) is not None:
                        values = plain_values(compared, column.target)
                        if values is not None:
                            yield path, values, required

    def _path_to_key(self, column: Any) -> str | None:
        """Return the path to ``column`` if it is the shard key of the query's rows; otherwise None.

        A path is a name for ``filter()``, such as ``owner_id`` or ``photo__owner_id``; see
        :attr:`BoundKey.name`.
        """
        options = shard_options(self.model) if self.model is not None else None
        if type(column) is not Col or options is None:
            return None
        if options.key is not None:
            is_key = _is_column(column, options.key) and column.alias in self._tables_of_row()
            return options.key.attname if is_key else None
        # The model is an automatic many-to-many table. Its rows have the shard key of the two rows
        # that they relate. So the column may be the shard key of either related model.
        for relation in options.relations:
            end = shard_options(relation.related_model)
            key: Any = None if end is None else end.key
            if key is None:
                continue
            is_key = _is_column(column, key) and column.alias in self._tables_of_row(relation)
            # If the foreign key refers to the shard key, its column contains the key. Then Django
            # makes no join, and compares the column of the foreign key.
            holds_key = _is_column(column, relation) and relation.target_field == key
            if is_key or (holds_key and column.alias in self._tables_of_row()):
                return f"{relation.name}__{key.attname}"
        return None

    def _tables_of_row(self, relation: Any = None) -> set[str]:
        """Return the aliases of the tables that store the columns of a row of the query's model.

        If ``relation`` is given, return the tables for the row to which ``relation`` refers. In
        multi-table inheritance, the tables of parents are included.
        """
        tables: set[str] = set()
        first = next(iter(self.alias_map), None)
        for alias, table in self.alias_map.items():
            link, joined_to = getattr(table, "join_field", None), table.parent_alias
            if relation is None:
                is_own = alias == first
            else:
                is_own = link == relation and joined_to == first
            is_parent = getattr(getattr(link, "remote_field", None), "parent_link", False)
            if is_own or (is_parent and joined_to in tables):
                tables.add(alias)
        return tables

    def exists(self, limit: bool = True) -> Self:
        # Overrides exists() of Django's query, which limits the query to one row. Record that
        # exists() has set the limit. A query with any other limit is a slice, which cannot be
        # filtered by the bound key.
        copy: Self = super().exists(limit)
        copy.is_limited_by_exists = not self.is_sliced
        return copy

    # -- Where Django turns a query into SQL, or into a part of another query --------------

    def get_compiler(self, *args: Any, **kwargs: Any) -> Any:
        # Add the condition on the bound key, so that no SQL is compiled without it. Usually, the
        # methods of the queryset have added it before.
        return super(BoundKeyQuery, self.with_bound_key()).get_compiler(*args, **kwargs)

    def resolve_expression(self, query: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Overrides Query.resolve_expression(), which Django calls for every subquery. Filter the
        # subquery by the bound key (set by bound()).
        return super(BoundKeyQuery, _filtered(_taken(self))).resolve_expression(
            query, *args, **kwargs
        )


def _taken(query: Any) -> Any:
    """Return ``query``, or a copy that stores the bound key if ``bound()`` has set one."""
    if (
        not isinstance(query, BoundKeyQuery)
        or query.model is None
        or key_in_force(query.model) is None
    ):
        return query
    copy: Any = query.clone()
    copy.take_bound_key()
    return copy


def _filtered(query: Any) -> Any:
    return query.with_bound_key() if isinstance(query, BoundKeyQuery) else query


def _is_column(column: Any, field: Any) -> bool:
    target = column.target
    is_of_model = target.model._meta.concrete_model is field.model._meta.concrete_model
    return bool(is_of_model and target.column == field.column)


def _is_same(one: object, other: object) -> bool:
    return one is other
