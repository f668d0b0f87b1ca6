"""Random calls of querysets and models, with random subqueries at random places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import (
    Avg,
    Case,
    Count,
    Exists,
    ExpressionWrapper,
    F,
    FilteredRelation,
    IntegerField,
    Max,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
    Window,
)
from django.db.models.functions import Coalesce, RowNumber
from django.db.models.lookups import GreaterThan, In
from hypothesis import strategies as st

from tests.integration.subqueries.conftest import OWNERS, Models, Trunks, Twigs, alias_of

#: Makes an expression or a queryset for one of the two sets of models.
Make = Callable[[Models], Any]
#: Runs on one of the two sets; its result is compared.
Program = Callable[[Models], Any]

#: Columns whose equal values are on one shard.
TOGETHER = {
    ("trunk", "trunk"): [("pk", "id")],
    ("trunk", "twig"): [("pk", "parent_id"), ("id", "parent")],
    ("twig", "trunk"): [("parent", "pk"), ("parent_id", "id"), ("parent__owner", "owner")],
    ("twig", "twig"): [("pk", "id"), ("parent", "parent_id"), ("parent__pk", "parent")],
}
OWN = {"trunk": ("id", "owner", "n"), "twig": ("id", "owner", "ref", "n", "parent_id")}


@st.composite
def forests(draw: st.DrawFn) -> tuple[Trunks, Twigs]:
    small = st.none() | st.integers(0, 3)
    trunks: Trunks = [
        (number, draw(st.sampled_from(OWNERS)), draw(small))
        for number in range(1, draw(st.integers(0, 5)) + 1)
    ]
    twigs: Twigs = []
    for number in range(1, draw(st.integers(0, 6)) + 1):
        owner = draw(st.sampled_from(OWNERS))
        # A foreign key inside the group: its row is on the same shard, under this shard key or
        # another.
        near = [trunk[0] for trunk in trunks if alias_of(trunk[1]) == alias_of(owner)]
        parent = draw(st.sampled_from([None, *near]))
        ref = draw(st.none() | st.integers(0, 6))
        twigs.append((number, owner, ref, draw(st.integers(0, 3)), parent))
    return trunks, twigs


# -- Subqueries


@st.composite
def conditions(draw: st.DrawFn, inner: str, outer: str | None) -> Make:
    """Conditions of a subquery; ``outer`` is the model that its outer references use, or None."""
    conditions: list[Make] = []
    owner = draw(st.sampled_from(OWNERS))
    own = OWN[inner]
    choices = ["n", "key", "keys", "not null", "joined", "none"]
    if outer is not None:
        choices += ["tie"] * 4
    drawn = draw(st.lists(st.sampled_from(choices), max_size=3))
    if draw(st.booleans()):
        drawn.append("key" if outer is None else "together")
    for choice in drawn:
        if choice == "together":
            assert outer is not None
            left, right = draw(st.sampled_from([*TOGETHER[inner, outer], ("owner", "owner")]))
            conditions.append(lambda _, left=left, right=right: Q(**{left: OuterRef(right)}))
        elif choice == "key":
            conditions.append(lambda _: Q(owner=owner))
        elif choice == "keys":
            conditions.append(lambda _: Q(owner__in=[owner, 1]))
        elif choice == "n":
            conditions.append(lambda _: Q(n__gt=0))
        elif choice == "not null":
            name = draw(st.sampled_from(own))
            conditions.append(lambda _, name=name: Q(**{f"{name}__isnull": False}))
        elif choice == "joined":
            joined = {"twig": "parent__n__gt", "trunk": "twigs__n__gt"}[inner]
            conditions.append(lambda _, joined=joined: Q(**{joined: 0}))
        elif choice == "none":
            conditions.append(lambda _: Q(pk__in=[]))
        elif choice == "tie":
            assert outer is not None
            names = [*own, "parent"] if inner == "twig" else [*own, "twigs"]
            left = draw(st.sampled_from([*names, "parent__owner"] if inner == "twig" else names))
            right = draw(st.sampled_from(["pk", *OWN[outer]]))
            tie: Make = lambda _, left=left, right=right: Q(**{left: OuterRef(right)})  # noqa: E731
            if draw(st.integers(0, 5)) == 0:
                conditions.append(lambda m, tie=tie: ~tie(m))
            elif draw(st.integers(0, 5)) == 0:
                conditions.append(lambda m, tie=tie: tie(m) | Q(n=1))
            else:
                conditions.append(tie)

    def make(models: Models) -> Q:
        condition = Q()
        for part in conditions:
            condition &= part(models)
        return condition

    return make


@st.composite
def querysets(draw: st.DrawFn, outer: str | None, depth: int = 1) -> tuple[str, Make]:
    inner = draw(st.sampled_from(["trunk", "twig"]))
    where = draw(conditions(inner, outer))
    nested: Make | None = None
    if depth and draw(st.integers(0, 3)) == 0:
        nested = draw(booleans(inner, depth - 1))
    negate = draw(st.booleans())

    def make(models: Models) -> QuerySet[Any]:
        rows = models.of(inner).objects.filter(where(models))
        if nested is not None:
            condition = nested(models)
            rows = rows.filter(~condition if negate else condition)
        return rows  # type: ignore[no-any-return]

    return inner, make


@st.composite
def scalars(draw: st.DrawFn, outer: str | None, depth: int = 1) -> Make:
    """A subquery of one value, which is the same however the rows are stored."""
    _, rows = draw(querysets(outer, depth))
    column = draw(st.sampled_from(["id", "n", "owner"]))
    shape = draw(st.sampled_from(["first", "last", "count", "max", "window"]))

    def make(models: Models) -> Any:
        queryset = rows(models)
        if shape == "count":
            counted = queryset.order_by().values("owner").annotate(x=Count("id", distinct=True))
            return Subquery(counted.order_by("owner").values("x")[:1])
        if shape == "max":
            largest = (
                queryset.order_by().annotate(one=Value(1)).values("one").annotate(x=Max(column))
            )
            return Subquery(largest.values("x"))
        if shape == "window":
            numbered = queryset.annotate(x=Window(RowNumber(), order_by=F("id").asc()))
            return Subquery(numbered.order_by("-id").values("x")[:1])
        order = ("id", "n") if shape == "first" else ("-id", "n")
        return Subquery(queryset.order_by(*order).values(column)[:1])

    return make


@st.composite
def instances(draw: st.DrawFn, outer: str) -> Make:
    """A condition on ``outer`` that compares with an instance, or with a list that has one."""
    name, model = {"twig": ("parent", "trunk"), "trunk": ("twigs", "twig")}[outer]
    number = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["instance", "list", "mixed", "negated"]))

    def make(models: Models) -> Q:
        row = models.everywhere(models.of(model).objects.filter(id=number)).first()
        if row is None:
            return Q(pk=0)
        if kind == "list":
            return Q(**{f"{name}__in": [row]})
        if kind == "mixed":
            return Q(**{f"{name}__in": [row, 0]})
        return ~Q(**{name: row}) if kind == "negated" else Q(**{name: row})

    return make


@st.composite
def booleans(draw: st.DrawFn, outer: str, depth: int = 1) -> Make:
    """A condition with a subquery, on rows of ``outer``."""
    kind = draw(
        st.sampled_from(
            ["exists", "in", "in", "in subquery", "compared", "or", "relation", "instance"]
        )
    )
    if kind == "instance":
        return draw(instances(outer))
    if kind == "relation":
        name = {"twig": "parent__n", "trunk": "twigs__n"}[outer]
        value = draw(st.integers(0, 2))
        return lambda _: Q(**{name: value})
    if kind == "exists":
        _, rows = draw(querysets(outer, depth))
        return lambda m: Q(Exists(rows(m)))
    column = draw(st.sampled_from(["pk", *OWN[outer]]))
    if kind == "compared":
        value = draw(scalars(outer, depth))
        operator = draw(st.sampled_from(["exact", "lt", "gte"]))
        return lambda m: Q(**{f"{column}__{operator}": value(m)})
    inner, rows = draw(querysets(outer if draw(st.booleans()) else None, depth))
    selected = draw(st.sampled_from(OWN[inner]))
    distinct = draw(st.booleans())
    listed: Make = lambda m: (  # noqa: E731
        rows(m).values(selected).distinct() if distinct else rows(m).values(selected)
    )
    if kind == "in":
        return lambda m: Q(**{f"{column}__in": listed(m)})
    if kind == "in subquery":
        return lambda m: Q(**{f"{column}__in": Subquery(listed(m))})
    return lambda m: Q(n=0) | Q(**{f"{column}__in": listed(m)})


# -- Querysets


@st.composite
def bases(draw: st.DrawFn) -> tuple[str, Make]:
    """All rows, the rows of one shard key, or those of several."""
    name = draw(st.sampled_from(["trunk", "twig"]))
    kind = draw(st.sampled_from(["key", "keys", "everywhere", "everywhere"]))
    owner = draw(st.sampled_from(OWNERS))

    def make(models: Models) -> QuerySet[Any]:
        rows = models.of(name).objects
        if kind == "key":
            return rows.filter(owner=owner)  # type: ignore[no-any-return]
        if kind == "keys":
            return rows.filter(owner__in=[owner, 2])  # type: ignore[no-any-return]
        return models.everywhere(rows.all())  # type: ignore[no-any-return]

    return name, make


@st.composite
def filtered(draw: st.DrawFn) -> tuple[str, Make]:
    name, base = draw(bases())
    if draw(st.booleans()):
        return name, base
    condition = draw(booleans(name))
    exclude = draw(st.booleans())
    return (
        name,
        lambda m: base(m).exclude(condition(m)) if exclude else base(m).filter(condition(m)),
    )


@st.composite
def reads(draw: st.DrawFn) -> Program:
    name, rows = draw(filtered())
    kind = draw(
        st.sampled_from(
            ["rows", "annotate", "case", "order", "aggregate", "filter of aggregate", "count",
             "relation", "wrapped", "lookup", "groups", "subtract"]
        )
    )  # fmt: skip
    scalar = draw(scalars(name))
    boolean = draw(booleans(name))
    _, some = draw(querysets(name))
    exists: Make = lambda m: Exists(some(m))  # noqa: E731

    def run(models: Models) -> Any:
        queryset = rows(models)
        if kind == "rows":
            return list(queryset.order_by("id").values_list("id", flat=True).distinct())
        if kind == "count":
            return queryset.distinct().count(), queryset.exists()
        if kind == "annotate":
            queryset = queryset.annotate(x=scalar(models), y=exists(models))
            return list(queryset.order_by("id", "x").values_list("id", "x", "y"))
        if kind == "case":
            queryset = queryset.annotate(
                x=Case(When(boolean(models), then=Value(1)), default=Value(0)),
                y=Coalesce(scalar(models), Value(7)) + 1,
            )
            return list(queryset.order_by("id", "x", "y").values_list("id", "x", "y"))
        if kind == "order":
            queryset = queryset.order_by(scalar(models), exists(models).desc(), "id")
            return list(queryset.values_list("id", flat=True)[:4])
        if kind == "aggregate":
            return queryset.aggregate(x=Sum(scalar(models)), y=Count("id"))
        if kind == "filter of aggregate":
            return queryset.aggregate(
                x=Count("id", filter=boolean(models)), y=Avg("n", filter=exists(models))
            )
        if kind == "relation":
            path = "twigs" if name == "trunk" else "parent"
            condition = Q(**{f"{path}__id__in": some(models).values("id")})
            queryset = queryset.annotate(z=FilteredRelation(path, condition=condition))
            return list(queryset.order_by("id", "z__id").values_list("id", "z__id"))
        if kind == "wrapped":
            wrapped = ExpressionWrapper(boolean(models), output_field=IntegerField())
            return list(queryset.annotate(x=wrapped).order_by("id", "x").values_list("id", "x"))
        if kind == "lookup":
            return list(
                queryset.filter(GreaterThan(F("n"), scalar(models)) | In(F("id"), [scalar(models)]))
                .order_by("id")
                .values_list("id", flat=True)
            )
        if kind == "groups":
            queryset = queryset.values("owner").annotate(x=Count("id", filter=exists(models)))
            return list(queryset.order_by("owner", "x"))
        return list(
            queryset.filter(n__in=[F("owner"), scalar(models)]).order_by("id").values_list("id")
        )

    return run


@st.composite
def writes(draw: st.DrawFn) -> Program:
    name, rows = draw(filtered())
    kind = draw(
        st.sampled_from(
            ["update", "update", "delete", "create", "save", "bulk_create", "bulk_update",
             "update_or_create", "get_or_create"]
        )
    )  # fmt: skip
    outer = name if kind in ("update", "save", "bulk_update", "update_or_create") else None
    value = draw(scalars(outer))
    guard = draw(booleans(name))
    owner = draw(st.sampled_from(OWNERS))

    def run(models: Models) -> Any:
        model = models.of(name)
        new: Make = lambda m: Coalesce(value(m), Value(0))  # noqa: E731
        if kind == "update":
            return rows(models).update(n=new(models))
        if kind == "delete":
            return rows(models).filter(guard(models)).delete()[0]
        if kind == "create":
            model.objects.create(id=77, owner=owner, n=new(models))
        elif kind == "bulk_create":
            objects = [model(id=70 + key, owner=key, n=new(models)) for key in (owner, 1, 2)]
            model.objects.bulk_create({row.id: row for row in objects}.values())
        elif kind in ("get_or_create", "update_or_create"):
            # The id of a row is unique only on its shard.
            first = models.everywhere(model.objects.filter(id=1)).first()
            key = {"id": 1, "owner": first.owner if first is not None else owner}
            if kind == "get_or_create":
                unsaved = model.objects.filter(guard(models) | Q(n__gte=0) | Q(n=None))
                return unsaved.get_or_create(**key, defaults={"n": 5})[1]
            return model.objects.update_or_create(
                **key, defaults={"n": new(models)}, create_defaults={"n": 4}
            )[1]
        else:
            objects = list(models.everywhere(model.objects.order_by("id")))
            for row in objects:
                row.n = new(models)
            if kind == "bulk_update":
                return model.objects.bulk_update(objects, ["n"])
            for row in objects[:1]:
                row.save()
        return None

    return run
