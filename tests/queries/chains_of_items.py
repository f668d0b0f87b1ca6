"""Random reads of items: all calls that have plans, and others, with values of all kinds."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from random import Random
from typing import Any
from uuid import UUID

from django.db.models import Exists, F, Prefetch, Q, Sum
from django.utils.functional import SimpleLazyObject, lazystr
from django.utils.safestring import mark_safe
from hypothesis import strategies as st

from tests.queries.chains import (
    Chain,
    Form,
    Values,
    chains,
    formatted,
    keywords,
    one_of,
    weighted,
)
from tests.queries.conftest import ONE, SHARD, START, TWO, UNPLACED
from tests.queries.small_chains import ENDS as SMALL_ENDS
from tests.queries.small_chains import frame_of_reads, small_chains
from tests.relatives.sharded.models import Agent, Item, Label, Shelf


class Number(IntEnum):
    ONE = ONE


class Text(str):
    """A text of a project."""


class Marked(Q):
    """A ``Q`` of a project."""


EAST = timezone(timedelta(hours=9))

#: Values of each kind that Django treats in its own way: prepared, refused, or with other SQL.
VALUES = [
    "ONE", "TWO", "UNPLACED", "0", "-1", "101", "104", "2**31", "2**63", "-(2**63) - 1", "10**30",
    "'1'", "'101'", "' 1'", "'item 101'", "'x'", "''", "'é'", "'a\\x00b'", "'1.5'", "True", "False",
    "None", "1.0", "1.5", "float('nan')", "Decimal(1)", "Decimal('NaN')", "Number.ONE", "Text('101')",
    "mark_safe('101')", "b'1'", "UUID(int=1)", "lazystr('1')", "date(2026, 1, 1)", "datetime(2026, 1, 2)",
    "START", "START.astimezone(EAST)", "time(3, 4)", "timedelta(1)", "[ONE, TWO]", "[101, 105, 101]",
    "(104,)", "{105, 101}", "frozenset({'101', '0104'})", "[101, None]", "[101, '104']", "[2**63, 101]",
    "[None]", "['item 101', 'item 105']", "[True]", "[date(2026, 1, 1)]", "[START]", "iter([101, 104])",
    "(n for n in (101, 104))", "[[101]]", "[]", "F('stars')", "[F('stars')]", "F('stars') + 1",
    "Agent.objects.get(pk=ONE)", "[Agent.objects.get(pk=ONE)]", "Agent()", "Agent(pk=TWO)",
    "SimpleLazyObject(lambda: Agent.objects.get(pk=ONE))", "Shelf.objects.get(owner_id=ONE, pk=11)",
    "Shelf(pk=11, owner_id=TWO)", "Item.objects.filter(owner_id=ONE)", "Q(stars=1)", "{'a': 1}",
]  # fmt: skip
_LIKE_NUMBERS = [
    "'101'", "Number.ONE", "101.0", "Decimal(101)", "True", "None", "lazystr('1')", "F('stars')", "2**63", "[101]",
    "Item(pk=101)",
]  # fmt: skip
_NUMBERS = Values(
    ["101", "ONE", "104", "0", "2", "11", "-1", "2**31", "2**63", "-(2**63) - 1", "10**30"],
    _LIKE_NUMBERS, VALUES,
)  # fmt: skip
_KEYS = Values(
    ["ONE", "ONE", "TWO", "UNPLACED"],
    ["'1'", "1.0", "True", "None", "Number.ONE", "F('stars')", "2**63"],
    VALUES,
)
_TEXTS = Values(
    ["'item 101'", "'item 104'", "'x'", "''", "'é'", "'%s'"],
    ["Text('item 101')", "mark_safe('x')", "lazystr('item 101')", "1", "None", "F('name')", "['x']"], VALUES,
)  # fmt: skip
_TIMES = Values(
    ["START", "START + timedelta(1)", "START.astimezone(EAST)"],
    ["datetime(2026, 1, 2)", "date(2026, 1, 1)", "'2026-01-01'", "None"], VALUES,
)  # fmt: skip
_LISTS = Values(
    ["[101, 105, 101]", "(104,)", "{105, 101}", "frozenset({104})", "[1, 2]", "[11]", "[2**63, 101]"],
    [
        "['101']", "[101, '104']", "[101, None]", "[None]", "[]", "()", "[Number.ONE]", "[True]", "[1.0]", "[F('id')]",
        "iter([101])", "[2**63]", "[[101]]", "[Shelf(pk=11, owner_id=ONE)]", "101", "None",
    ], VALUES,
)  # fmt: skip
_BOOLEANS = Values(["True", "False"], ["0", "1", "None", "'x'"], VALUES)
_TEXT_LISTS = Values(
    ["['item 101', 'item 105']", "('x',)", "{'item 104'}"],
    ["[Text('item 101')]", "['x', None]", "['x', 1]", "[lazystr('x')]", "[]"], VALUES,
)  # fmt: skip
_AGENTS = Values(
    ["Agent(pk=ONE)", "ONE", "Agent(pk=TWO)", "Agent.objects.get(pk=ONE)", "TWO"],
    ["Agent()", "None", "'1'", "Item(pk=1)", "SimpleLazyObject(lambda: Agent(pk=ONE))", "[Agent(pk=ONE)]"],
    VALUES,
)  # fmt: skip
_SHELVES = Values(
    ["11", "Shelf(pk=11, owner_id=ONE)", "Shelf.objects.get(owner_id=ONE, pk=11)", "12", "None"],
    ["Shelf(pk=11, owner_id=TWO)", "Shelf()", "Shelf(pk=11)", "Agent(pk=ONE)", "'11'"], VALUES,
)  # fmt: skip
#: The values for each name of a condition.
CONDITIONS: dict[str, Values] = {
    **dict.fromkeys(("pk", "id", "stars", "shelf_id", "buyer_id", "city_id", "parent_id"), _NUMBERS),
    **dict.fromkeys(("stars__gt", "pk__lt", "id__gte", "stars__lte", "shelf__id"), _NUMBERS),
    **dict.fromkeys(("owner_id", "owner_id__gt", "owner__exact"), _KEYS),
    **dict.fromkeys(("name", "name__gt", "name__iexact", "shelf__name"), _TEXTS),
    **dict.fromkeys(("posted_at", "posted_at__lt", "posted_at__gte"), _TIMES),
    **dict.fromkeys(("pk__in", "id__in", "stars__in", "shelf__in", "shelf_id__in", "buyer__in"), _LISTS),
    **dict.fromkeys(("owner__in", "city__in", "pk__range"), _LISTS),
    **dict.fromkeys(("pk__isnull", "shelf__isnull", "posted_at__isnull", "owner__isnull", "city__isnull"), _BOOLEANS),
    "name__in": _TEXT_LISTS,
    "posted_at__in": Values(["[START]", "(START,)"], ["[datetime(2026, 1, 2)]"], VALUES),
    **dict.fromkeys(("owner", "buyer", "seller"), _AGENTS),
    **dict.fromkeys(("shelf", "parent"), _SHELVES),
    **dict.fromkeys(("nothing", "owner__x", "_connector"), Values(VALUES)),
}  # fmt: skip
#: The values for these and other places.
PLACES: dict[str, Values] = CONDITIONS | {
    # Of conditions in trees, most of which Django accepts, because many trees have several.
    "tree_number": Values(["1", "0", "2", "101", "104"], ["2**63", "Number.ONE", "'1'", "None", "True"]),
    "tree_list": Values(["[101]", "[101, 104]", "(104,)"], ["{'101'}", "[]", "[None]", "[F('id')]"]),
    "tree_text": Values(["'item 101'", "'x'"], ["None", "Text('x')", "1"]),
    "tree_boolean": Values(["True", "False"], ["1"]),
    "tree_time": Values(["START", "START + timedelta(1)", "START.astimezone(EAST)"], ["datetime(2026, 1, 2)"]),
    "tree_shelf": Values(["11", "Shelf(pk=11, owner_id=ONE)"], ["None", "Shelf(pk=11, owner_id=TWO)", "Shelf()"]),
    "key": Values(["ONE", "ONE", "TWO"], ["UNPLACED", "'1'", "Number.ONE", "True", "None", "2**63"]),
    "agent": Values(["Agent(pk=ONE)", "Agent(pk=TWO)", "Agent.objects.get(pk=ONE)", "ONE"], ["Agent()", "None"]),
    "pks": Values(["101", "104", "105", "999"], ["2**63", "'101'", "Number.ONE"]),
    "slice": Values(
        ["1:3", "0:2", "2:4", "1:2", ":1", "1:"],
        ["2:2", "0:0", "3:1", ":", "0:4:2", "-1:", "'a':", "True:2", "2:2**63"],
    ),
    "alias": Values(["SHARD[ONE]", "SHARD[TWO]"], ["None", "'photos'", "'default'", "'nowhere'", "1"]),
}  # fmt: skip
#: Conditions that most plans are about; those of lists and texts have more kinds of values.
_PLANNED = [
    "pk", "stars", "name", "name", "shelf", "buyer", "stars__gt", "pk__in", "pk__in", "stars__in", "name__in",
    "posted_at__lt", "shelf__isnull", "owner_id",
]  # fmt: skip
#: Conditions outside trees.
NAMES = [*_PLANNED * 12, *CONDITIONS]

# -- Trees

LEAVES = [
    "Q(stars=<tree_number>)", "Q(stars__gt=<tree_number>, name=<tree_text>)", "Q(pk=<pks>)",
    "Q(owner_id=<key>)", "Q(shelf=<tree_shelf>)", "Q(shelf__isnull=<tree_boolean>)", "Q(pk__in=<tree_list>)",
    "Q(posted_at__lte=<tree_time>)", "Q(name=<tree_text>)", "Q(pk__lt=<tree_number>, stars=1)",
    "Q(buyer_id=<tree_number>)", "Q(shelf__owner_id=<key>)", "Q(city__isnull=<tree_boolean>)",
    "Q(buyer=<agent>)",
]  # fmt: skip
#: Other combinations, most of which have no plan.
PARTS = [
    "({} ^ {})", "Q({}, {}, _connector='OR')", "Q()", "(Q() | {})", "Q({})", "Q(Exists(Item.objects.filter(owner_id=ONE)), {})",
    "Q(('stars', 1), {})", "Q({}, stars=F('stars'))", "Q(_connector='OR', stars=1, shelf=None)", "(Q(stars=1) | Q(stars=1))",
    "Q({}, _connector='OR')", "Q(_connector='OR', owner_id=ONE)", "Marked(stars=1)", "Q(Marked(stars=1), {})", "~Q()",
]  # fmt: skip


_leaves = weighted((4, one_of(*LEAVES)), (1, formatted("Q({})", keywords(_PLANNED))))


def _trees(inner: Form) -> Form:
    return weighted(
        (6, _leaves),
        (4, formatted("({} | {})", inner, inner)),
        (3, formatted("({} & {})", inner, inner)),
        (3, formatted("~{}", inner)),
        (2, formatted(one_of(*PARTS), inner, inner)),
    )


trees = _trees(_trees(_leaves))

# -- Steps

STARTS = [
    *["Item.objects"] * 5, *["Item.objects.all()"] * 3, "Item._base_manager", "Agent(pk=<key>).items",
    "Item(pk=101, owner_id=ONE).children", "Item.objects.using(<alias>)",
]  # fmt: skip
KEYS = [
    *[".filter(owner_id=<key>)"] * 8,
    ".filter(owner=<agent>)",
    ".filter(Q(owner_id=<key>))",
    "",
]
FIELDS = [
    *["'pk'", "'id', 'name'", "'owner'", "'owner_id', 'stars'", "'owner', 'owner_id'", "'posted_at'", ""] * 3,
    "'shelf__name'", "'nothing'", "'name', 'name'", "'labels'", "F('stars')", "None", "'stars', 'pk'",
]  # fmt: skip
SELECTIONS = [
    *[".values({})", ".values_list({})", ".values_list({}, named=True)", ".only({})", ".defer({})"] * 3,
    *[".select_related('shelf', 'parent')", ".values_list('pk', flat=True)"] * 3,
    ".values_list({}, flat=True)", ".values_list({}, named=True, flat=True)", ".values(more=F('stars'))", ".select_related({})",
]  # fmt: skip
PREFETCHES = [
    *["'children'", "'shelf'", "'shelf', 'children__labels'"] * 2, "Prefetch('children', Item.objects.order_by('-pk')[:1])",
    "Prefetch('children', to_attr='kids')", "None", "", "'nothing'", "1", "F('stars')", "'owner'", "'buyer', 'labels'",
]  # fmt: skip
ORDERS = [
    *["'pk'", "'-stars', 'id'", "", "'name'", "'owner_id'", "'-posted_at', 'pk'"] * 2, "'shelf__name'", "'nothing'",
    "F('stars').desc()", "1",
]  # fmt: skip
_methods = one_of("filter", "filter", "exclude")


def _selections(pick: Random) -> str:
    return formatted(one_of(*SELECTIONS), one_of(*FIELDS))(pick).replace("(, ", "(")


steps = weighted(
    (16, formatted(".{}({})", _methods, keywords(NAMES))),
    (8, formatted(".{}({})", _methods, trees)),
    (1, formatted(".{}({}, {}, stars__gte=0)", _methods, trees, trees)),
    (4, _selections),
    (4, formatted(".order_by({})", one_of(*ORDERS))),
    (4, formatted(".prefetch_related({})", one_of(*PREFETCHES))),
    (2, one_of(".using(<alias>)")),
    (2, one_of(".all()")),
)
#: Reads that Django does of a slice, too.
ENDS_OF_PAGES = [
    *["list({})"] * 14, *["{}.exists()", "{}.count()"] * 7, "len({})", "bool({})", "repr({})", "{}.get()", "{}.ordered",
    "[(row, row._prefetched_objects_cache, row._state.fields_cache) for row in {}]", "list({}.values('pk'))",
    "(lambda rows: [rows.exists(), list(rows), rows.count()])({})", "list({}.iterator())", "str({}.query)",
    "list({}.select_related('shelf'))", "list({}.only('name'))", "list({}.prefetch_related('children'))",
    "list(copy.deepcopy({}))", "list(pickle.loads(pickle.dumps({})))", "{}.aggregate(Sum('stars'))",
    "list({}.using(<alias>))", "{}.using(<alias>).exists()", "[row.pk for row in {}.all()]",
    "(lambda rows: [rows.db, list(rows), rows.db])({})", "[row._state.db for row in {}]", "{}[0]", "{}[5]",
    "{}[-1]", "{}['a']",
]  # fmt: skip
ENDS = [
    *["{}.first()"] * 9, *["{}[<slice>].exists()"] * 9, *["{}[<slice>].count()"] * 3, "{}.last()", "list({}.reverse())", "(lambda rows: [rows.exists(), list(rows), rows.first()])({})",
    "(lambda rows: list(rows | rows))({})", "(lambda rows: list(rows.union(rows)))({})", "list({}.distinct())",
    "{}.in_bulk()", "list({}.scatter().order_by('pk'))", "list({}.exclude(stars=2))", "list({}.complex_filter(dict()))",
    "list({}.complex_filter(dict(stars=1)))", "list({}.filter())", "list({}.exclude())",
    "list({}.complex_filter(Q(stars=1)))", "list(Item.objects.filter(owner_id=ONE, pk__in={}.filter(owner_id=ONE)))",
]  # fmt: skip
_pages = one_of(*["{}"] * 3, *["{}[<slice>]"] * 3, "{}[<slice>][<slice>]")
_ends = weighted(
    (10, one_of(*ENDS_OF_PAGES)),
    (10, formatted(one_of(*ENDS_OF_PAGES), _pages)),
    (5, one_of(*ENDS)),
    (3, formatted("{{}}.get({})", keywords(NAMES, 1))),
    (3, one_of("{}.get(pk=<pks>)")),
    (2, formatted("{{}}.get({})", trees)),
    (1, formatted(one_of(*ENDS), _pages)),
)


def _large(pick: Random) -> str:
    parts = [steps(pick) for _ in range(pick.randrange(4))]
    parts.insert(pick.randrange(len(parts) + 1), pick.choice(KEYS))
    # A manager is no queryset.
    calls = "".join(parts) or ".all()"
    return _ends(pick).format(pick.choice(STARTS) + calls)


# -- Small chains


def changed_items(agent: Agent, key: Any) -> Any:
    """Return the items of an agent that gets another key before they are read."""
    items = agent.items.all()
    agent.pk = key
    return items


_SMALL_NAMES = [
    *["name", "stars"] * 4, *["pk__in", "name__in", "stars__in"] * 3, *["pk", "shelf", "buyer"] * 2, "stars__gt", "posted_at__lt",
    "shelf_id", "shelf__in", "shelf__isnull", "city_id", "owner_id", "owner_id",
]  # fmt: skip
_SMALL_STARTS = [
    *["Item.objects.filter(owner_id=<key>)"] * 20, "Item.objects.filter(owner=<agent>)", "Agent(pk=<key>).items.all()",
    "Item.objects.using(<alias>).filter(owner_id=<key>)", "Item.objects.all()", "changed_items(Agent(pk=<key>), <key>)",
]  # fmt: skip
_SMALL_FIELDS = ["'pk'", "'name', 'pk'", "'owner_id', 'stars', 'id'", "'-pk'", ""]
_SMALL_ENDS = [*SMALL_ENDS, "list({}.select_related('shelf'))", "{}.get(pk=<pks>)"]
_small = frame_of_reads(_SMALL_STARTS, _SMALL_NAMES, _SMALL_FIELDS, _SMALL_ENDS)
_MEANINGS: dict[str, Any] = {
    thing.__name__: thing
    for thing in (
        Agent, changed_items, Decimal, Exists, F, Item, Label, Marked, Number, Prefetch, Q, Shelf, SimpleLazyObject, Sum, Text,
        UUID, copy, date, datetime, lazystr, mark_safe, pickle, time, timedelta,
    )
} | {"EAST": EAST, "ONE": ONE, "SHARD": SHARD, "START": START, "TWO": TWO, "UNPLACED": UNPLACED, "UTC": UTC}  # fmt: skip


def chains_of_items() -> st.SearchStrategy[list[Chain]]:
    """Reads of :class:`Item` that differ only in values."""
    return chains(_large, PLACES, _MEANINGS)


def small_chains_of_items() -> st.SearchStrategy[list[Chain]]:
    """Small reads of :class:`Item` that differ in values or in one part."""
    return small_chains(_small, PLACES, _MEANINGS)


#: Reads that differ in little, and have other SQL, other rows, or no plan.
_ALIKE = [
    [
        f"Item.objects.filter(owner_id=ONE){page}.{end}()"
        for page in ("", "[1:3]", "[5:9]")
        for end in ("exists", "count", "first")
    ],
    [
        f"list(Item.objects.filter(owner_id=ONE).{call})"
        for call in ("filter(stars=1)", "exclude(stars=1)", "filter(~Q(stars=1))", "filter(Q(stars=1))")
    ],
    [
        f"list(Item.objects.filter(owner_id=ONE).order_by({names}))"
        for names in ("'stars', 'pk'", "'-stars', 'pk'", "'-stars', '-pk'", "'-pk'", "")
    ],
    [
        f"list(Item.objects.filter(owner_id=ONE, {condition}={value}).order_by('pk'))"
        for condition in ("shelf_id", "buyer_id", "name", "stars")
        for value in ("11", "None", "'11'", "True", "Decimal(11)", "11.0", "Text('11')", "Number.ONE")
    ],
    [
        f"list(Item.objects.filter(owner_id=ONE, pk__in={some}).order_by('pk'))"
        for some in ("[101, 104]", "['101', '104']", "[101, '104']", "(101,)", "{101}", "[]", "[None]", "[101, None]")
    ],
    [
        f"list(Item.objects.filter(owner_id={key}).filter(owner_id={other}))"
        for key in ("ONE", "TWO") for other in ("ONE", "TWO", "str(ONE)")
    ],
    [
        f"list(Agent(pk={key}).items.filter(owner_id={other}))"
        for key in ("ONE", "TWO") for other in ("ONE", "TWO")
    ],
    [
        f"list(Item.objects.using({alias}).filter(owner_id=ONE))"
        for alias in ("SHARD[ONE]", "SHARD[TWO]", "'photos'", "None", "'nowhere'")
    ],
]  # fmt: skip


def alike_chains_of_items() -> list[list[Chain]]:
    """Chosen reads of :class:`Item`, which every run compares."""
    return [[Chain(source, _MEANINGS) for source in sources] for sources in _ALIKE]
