"""Separates the values in the arguments of ``filter()`` and ``exclude()`` from their structure.

Two calls whose ``Q`` objects differ only in their values get the same SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.db.models import Q

from sharded_orm.models.plans.conditions import kind_of

#: The maximum number of conditions in one call. Calls with more conditions are mostly made by a
#: loop over data, so the number differs from call to call, and a plan would rarely be used again.
MAX_CONDITIONS = 20


class ConditionTree(NamedTuple):
    """The arguments of one call of ``filter()`` or ``exclude()``.

    :param root: the arguments as one ``Q``, as Django combines them.
    :param shape: the tree as nested tuples, with types instead of values, such as
        ``("AND", False, ("stars__gt", int), ("user_id", int))``.
    :param leaves: the conditions, as pairs such as ``("user_id", 1)``, in the order in which Django
        puts them into the SQL.
    """

    root: Q
    shape: tuple[Any, ...]
    leaves: list[tuple[str, Any]]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ConditionTree | None:
        """Return the tree of a call; None if Django must handle the call.

        Django must handle it if an argument is not exactly a ``Q``, if a ``Q`` has no conditions or
        uses XOR, or if there are more than :data:`MAX_CONDITIONS` conditions.
        """
        if not all(type(arg) is Q for arg in args):
            return None
        # Combine the arguments as QuerySet._filter_or_exclude_inplace() does.
        root = Q(*args)
        root.children += sorted(kwargs.items())
        leaves: list[tuple[str, Any]] = []
        shape = _shape(root, leaves)
        return None if shape is None else cls(root, shape, leaves)

    def is_demanded(self) -> list[bool]:
        """Return for each leaf whether every matching row must meet this condition.

        That is so if the condition is not below a NOT, and not below an OR of several parts.
        """
        return list(_demanded(self.root, True))


def _shape(node: Q, leaves: list[tuple[str, Any]]) -> tuple[Any, ...] | None:
    """Add the conditions in ``node`` to ``leaves``, and return the shape of ``node``.

    Return None if Django must handle the call.
    """
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
    # An OR of only one part is the same as an AND. Django's WhereNode.add() treats it so, too.
    return not node.negated and (node.connector == Q.AND or len(node.children) == 1)


def with_values(node: Q, replace: Callable[[Any], Any]) -> Q:
    """Return a copy of ``node`` in which each value is replaced by ``replace(value)``.

    ``replace`` is called in the order of :attr:`ConditionTree.leaves`.
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
    """Return a ``Q`` of those conditions in ``node`` that every matching row must meet.

    For example, return ``Q(user_id=1)`` for ``Q(user_id=1) & (Q(stars=5) | Q(stars=4))``.
    """
    return Q(*_demanded_leaves(node))


def _demanded_leaves(node: Q) -> Iterator[Any]:
    if _demands_its_parts(node):
        for child in node.children:
            if isinstance(child, Q):
                yield from _demanded_leaves(child)
            else:
                yield child
