"""``Q`` objects in calls of ``filter()`` and ``exclude()``: the tree, and the values in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.db.models import Q

from sharded_orm.models.plans.conditions import kind_of

#: The maximum number of conditions in one call. Longer trees are mostly made by a loop over data, so each
#: would have a shape of its own.
MAX_CONDITIONS = 20


class ConditionTree(NamedTuple):
    """The arguments of one call of ``filter()`` or ``exclude()``.

    :param root: the arguments as one ``Q``, as Django combines them.
    :param shape: the tree with the types of the values in the place of the values.
    :param leaves: pairs of name and value in the order in which Django puts them into the SQL.
    """

    root: Q
    shape: tuple[Any, ...]
    leaves: list[tuple[str, Any]]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ConditionTree | None:
        """Return the tree of a call; None if it has a part that must be left to Django: an argument
        that is not exactly a ``Q``, or a ``Q`` with XOR or without conditions.
        """
        if not all(type(arg) is Q for arg in args):
            return None
        # As QuerySet._filter_or_exclude_inplace().
        root = Q(*args)
        root.children += sorted(kwargs.items())
        leaves: list[tuple[str, Any]] = []
        shape = _shape(root, leaves)
        return None if shape is None else cls(root, shape, leaves)

    def is_demanded(self) -> list[bool]:
        """Return for each leaf whether each matching row meets it: no NOT is above it, and no OR of
        several parts.
        """
        return list(_demanded(self.root, True))


def _shape(node: Q, leaves: list[tuple[str, Any]]) -> tuple[Any, ...] | None:
    """Return the shape of a node, and add its conditions to ``leaves``. None if Django must handle it."""
    parts: list[Any] = []
    child: Any
    for child in node.children:
        part = None
        if type(child) is Q:
            part = _shape(child, leaves)
        elif type(child) is tuple and len(child) == 2 and type(child[0]) is str:
            leaves.append(child)
            part = (child[0], kind_of(child[1]))
        if part is None or len(leaves) > MAX_CONDITIONS:
            return None
        parts.append(part)
    if not parts or node.connector not in (Q.AND, Q.OR):
        return None
    return (node.connector, node.negated, *parts)


def _demanded(node: Q, is_demanded: bool) -> Iterator[bool]:
    is_demanded = is_demanded and _demands_its_parts(node)
    for child in node.children:
        if isinstance(child, Q):
            yield from _demanded(child, is_demanded)
        else:
            yield is_demanded


def _demands_its_parts(node: Q) -> bool:
    # Django's WhereNode.add() also takes the only part of an OR as a part of an AND.
    return not node.negated and (node.connector == Q.AND or len(node.children) == 1)


def with_values(node: Q, replace: Callable[[Any], Any]) -> Q:
    """Return a copy of a tree whose values are those that ``replace`` returns.

    ``replace`` is called with each value, in the order of the leaves.
    """
    copy = Q(_connector=node.connector, _negated=node.negated)
    child: Any
    for child in node.children:
        if isinstance(child, Q):
            copy.children.append(with_values(child, replace))
        else:
            copy.children.append((child[0], replace(child[1])))
    return copy


def demanded_conditions(node: Q) -> Q:
    """Return those conditions of a tree that each matching row meets."""
    return Q(*_demanded_leaves(node))


def _demanded_leaves(node: Q) -> Iterator[Any]:
    if _demands_its_parts(node):
        for child in node.children:
            if isinstance(child, Q):
                yield from _demanded_leaves(child)
            else:
                yield child
