from __future__ import annotations

from tests.integration.references.site import Site

#: Rows of the reference tables, of the sharded models and of their twins on one database.
ROWS = """
import random

def rows(draw):
    for n, name in enumerate(["Europe", "Asia"], 1):
        Continent.objects.create(pk=n, name=name)
        TwinContinent.objects.create(pk=n, name=name)
    names = ["Ålesund", "alpha", "Beta", "beta", "Öland", "zeta", "Zeta", ""]
    for n, name in enumerate(names, 1):
        values = dict(name=name, code=f"c{n}", continent_id=draw.choice([1, 2, None]), area=draw.randrange(9),
                      neighbour_id=draw.choice([None, *range(1, n)]))
        Country.objects.create(pk=n, **values)
        TwinCountry.objects.create(pk=n, **values)
    for owner in range(1, 9):
        for n in range(draw.randrange(5)):
            values = dict(owner_id=owner, title=draw.choice("abc"), views=draw.randrange(4),
                          country_id=draw.choice([None, *range(1, 9)]))
            photo = Photo.objects.create(**values)
            TwinPhoto.objects.create(pk=photo.pk, **values)
            if draw.random() < 0.7:
                values = dict(owner_id=owner, photo_id=photo.pk, text=draw.choice("xy"),
                              country_id=draw.choice([None, *range(1, 9)]))
                remark = Remark.objects.create(**values)
                TwinRemark.objects.create(pk=remark.pk, **values)
"""
#: Draws queries, runs them on both sides, and compares.
COMPARISON = """
class Side:
    def __init__(self, prefix, scatter):
        self.scatter = scatter
        for name in ("Photo", "Remark", "Country", "Continent"):
            setattr(self, name, globals()[prefix + name])

    def rows(self, model):
        manager = getattr(self, model).objects
        return manager.uncached().scatter() if self.scatter else manager.all()

SIDES = Side("", True), Side("Twin", False)

def conditions(draw, way):
    country = f"{way}country"
    return draw.choice([
        lambda side: Q(**{f"{country}__name": draw_name}),
        lambda side: Q(**{f"{country}__name__gt": "b"}),
        lambda side: Q(**{f"{country}__continent__name": "Europe"}),
        lambda side: Q(**{f"{country}__continent__isnull": True}),
        lambda side: Q(**{f"{country}__neighbour__continent__name__startswith": "A"}),
        lambda side: ~Q(**{f"{country}__continent": 1}),
        lambda side: ~Q(**{f"{country}__neighbour__name": draw_name}),
        lambda side: Q(**{f"{country}__area__gte": F("views" if not way else "photo__views")}),
        lambda side: Q(**{f"{country}__in": side.Country.objects.filter(area__gt=3)}),
        lambda side: ~Q(**{f"{country}__in": side.Country.objects.filter(continent__name="Asia")}),
        lambda side: Q(**{f"{country}__area": Subquery(side.Country.objects.order_by("-area").values("area")[:1])}),
        lambda side: Q(Exists(side.Country.objects.filter(pk=OuterRef(f"{country}"), area__lt=4))),
        lambda side: Q(views__gt=1) if not way else Q(photo__views__gt=1),
        lambda side: Q(**{f"{country}__code__in": ["c1", "c3", "c5"]}),
    ])

def query(draw):
    global draw_name
    draw_name = draw.choice(["beta", "Beta", "zeta", ""])
    model, way = draw.choice([("Photo", ""), ("Remark", ""), ("Remark", "photo__")])
    if model == "Remark" and not way:
        parts = [lambda side: Q(country__name__lt="c"), lambda side: ~Q(country__continent__name="Asia")]
    else:
        parts = [conditions(draw, way) for _ in range(draw.randrange(1, 4))]
    either = draw.random() < 0.4
    form = draw.choice(["values", "count", "group", "order", "slice", "instances", "distinct", "annotate"])
    country = f"{way}country"
    def run(side):
        where = Q()
        for part in parts:
            where = where | part(side) if either else where & part(side)
        rows = side.rows(model).filter(where)
        if form == "count":
            return rows.count(), rows.exists()
        if form == "group":
            grouped = rows.order_by().values(f"{country}__continent__name").annotate(n=Count("pk"), top=Max(f"{country}__area"))
            return sorted(map(repr, grouped))
        if form == "order":
            return [row.pk for row in rows.order_by(f"{country}__area", "-pk")]
        if form == "slice":
            return [row.pk for row in rows.order_by(f"-{country}__code", "pk")[1:4]]
        if form == "instances":
            rows = rows.select_related(f"{country}__continent", f"{country}__neighbour").order_by("pk")
            found = []
            for row in rows:
                there = row.photo.country if way else row.country
                found.append((row.pk, there and (there.name, there.area, there.continent and there.continent.name,
                                                 there.neighbour and there.neighbour.code)))
            return found
        if form == "distinct":
            return sorted(map(repr, rows.order_by().values_list(f"{country}__continent__name").distinct()))
        if form == "annotate":
            return sorted(map(repr, rows.order_by().annotate(c=F(f"{country}__code"), known=Case(
                When(**{f"{country}__area__gt": 2}, then=Value("big")), default=Value("small"))).values_list("pk", "c", "known")))
        return sorted(map(repr, rows.values_list("pk", f"{country}__name", f"{country}__continent__name")))
    return form, run

def compare(draw, number):
    refusals, forms = 0, set()
    for n in range(number):
        form, run = query(draw)
        expected = run(SIDES[1])
        try:
            found = run(SIDES[0])
        except (CrossShardRelation, ScatterNotSupported):
            refusals += 1
            continue
        forms.add(form)
        assert found == expected, (n, form, found, expected)
    return refusals, len(forms)
"""


def test_queries_are_equal_to_one_database(site_everywhere: Site) -> None:
    printed = site_everywhere.run(
        f"{ROWS}\n{COMPARISON}\ndraw = random.Random(7)\nrows(draw)\nprint(*compare(draw, 150))"
    )
    refused, forms = map(int, printed.split())
    assert refused == 0
    assert forms == 8


def test_ways_from_a_copy_to_other_shards_are_refused(site: Site) -> None:
    assert (
        site.run(
            """
print([
    refused(CrossShardRelation, lambda: list(rows))[0]
    for rows in (
        Photo.objects.scatter().filter(country__photo__title="a"),
        Photo.objects.filter(owner_id=1, country__remarks__text="a"),
        Photo.objects.scatter().exclude(country__photo__title="a"),
        Photo.objects.scatter().filter(country__in=Country.objects.filter(photo__title="a")),
        Photo.objects.scatter().filter(country__in=Photo.objects.filter(views=1).values("country")),
        Photo.objects.scatter().annotate(n=Count("country__remarks")),
        Photo.objects.filter(owner_id=1).values_list("title").union(Country.objects.values_list("name")),
        Country.objects.filter(photo__title="a"),
        Country.objects.annotate(n=Count("photo")),
    )
] == ["CrossShardRelation"] * 9)
"""
        )
        == "True"
    )
