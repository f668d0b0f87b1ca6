"""Rows of two shard keys are not related, whether or not the two keys share a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django import forms
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Count, Prefetch
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

from sharded_orm.exceptions import CrossKeyRelation, CrossShardRelation
from sharded_orm.models.sharding.options import shard_options
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO
from tests.relatives.sharded.models import Agent, Cover, Item, Label, Shelf
from tests.twins.models import Trunk, Twig

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture
def shelves(placed: None) -> dict[int, Shelf]:
    """A shelf for each of three keys; ``ONE`` and ``NEAR`` share a shard."""
    assert SHARD[ONE] == SHARD[NEAR] != SHARD[TWO]
    agents = {key: Agent.objects.create(id=key, name=f"agent {key}") for key in (ONE, NEAR, TWO)}
    return {
        key: Shelf.objects.create(id=10 + key, name=f"shelf {key}", owner=agent)
        for key, agent in agents.items()
    }


def _item(shelves: dict[int, Shelf], key: int, pk: int, **values: Any) -> Item:
    owner = shelves[key].owner
    return Item(id=pk, name=f"item {pk}", owner=owner, seller=owner, **values)


def _changed(row: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(row, name, value)
    return row


Write = Callable[[dict[int, Shelf], Item, Any], Any]
#: Each write relates an item of the key ONE to a row of another key.
WRITES: dict[str, Write] = {
    "assign": lambda shelves, item, key: _changed(item, shelf=shelves[key]),
    "initialize": lambda shelves, item, key: _item(shelves, ONE, 8, shelf=shelves[key]).save(),
    "save": lambda shelves, item, key: _changed(
        Item(id=8, name="new", shelf=shelves[key], seller_id=ONE), owner_id=ONE
    ).save(),
    "create": lambda shelves, item, key: Item.objects.create(
        id=8, name="new", shelf=shelves[key], owner=shelves[ONE].owner, seller_id=ONE
    ),
    "bulk_create": lambda shelves, item, key: Item.objects.bulk_create(
        [
            _item(shelves, TWO, 9),
            _changed(Item(id=8, name="new", shelf=shelves[key], seller_id=ONE), owner_id=ONE),
        ]
    ),
    "get_or_create": lambda shelves, item, key: Item.objects.get_or_create(
        owner=shelves[ONE].owner, id=8, defaults={"shelf": shelves[key], "seller_id": ONE}
    ),
    "update_or_create": lambda shelves, item, key: Item.objects.update_or_create(
        owner_id=ONE, id=item.pk, defaults={"shelf": shelves[key]}
    ),
    "update": lambda shelves, item, key: Item.objects.filter(owner=ONE).update(shelf=shelves[key]),
    "update of several keys": lambda shelves, item, key: Item.objects.filter(
        owner__in=[ONE, TWO, NEAR]
    ).update(shelf=shelves[key]),
    "scattered update": lambda shelves, item, key: Item.objects.scatter().update(
        shelf=shelves[key]
    ),
    "add": lambda shelves, item, key: shelves[key].items.add(item),
    "add, bulk=False": lambda shelves, item, key: shelves[key].items.add(item, bulk=False),
    "set": lambda shelves, item, key: shelves[key].items.set([item]),
    "create from the other side": lambda shelves, item, key: shelves[key].items.create(
        id=8, name="new", owner_id=ONE, seller_id=ONE
    ),
    "one-to-one": lambda shelves, item, key: Cover.objects.create(
        id=8, name="new", owner=shelves[key].owner, item=item
    ),
    "one-to-one from the other side": lambda shelves, item, key: _changed(
        item, cover=Cover(id=8, name="new", owner=shelves[key].owner)
    ),
}


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_a_row_of_a_many_to_many_table_relates_one_key(shelves: dict[int, Shelf], key: int) -> None:
    item = Item.objects.create(id=7, name="item", owner=shelves[ONE].owner, seller_id=ONE)
    label = Label.objects.create(id=5, name="label", owner=shelves[key].owner)
    through: Any = Item.labels.through
    with pytest.raises(CrossKeyRelation, match="the same shard key"):
        through.objects.create(item=item, label=label)
    assert not through.objects.scatter().exists()


@pytest.mark.parametrize("key", [NEAR, TWO])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_row_of_another_key_is_refused(shelves: dict[int, Shelf], write: Write, key: int) -> None:
    item = Item.objects.create(
        id=7, name="item", owner=shelves[ONE].owner, seller_id=ONE, shelf=shelves[ONE]
    )
    with pytest.raises(CrossKeyRelation, match="the same shard key"):
        write(shelves, item, key)
    (stored,) = Item.objects.scatter()
    assert stored.shelf == shelves[ONE]


@pytest.mark.parametrize("key", [NEAR, TWO])
@pytest.mark.parametrize("name", ["assign", "create", "update"])
def test_a_lazy_object_in_a_lazy_object_is_refused(
    shelves: dict[int, Shelf], name: str, key: int
) -> None:
    item = Item.objects.create(
        id=7, name="item", owner=shelves[ONE].owner, seller_id=ONE, shelf=shelves[ONE]
    )
    lazy: Any = SimpleLazyObject(lambda: SimpleLazyObject(lambda: shelves[key]))
    with pytest.raises(CrossKeyRelation, match=rf"Shelf\(pk={10 + key}\)"):
        WRITES[name]({**shelves, key: lazy}, item, key)
    (stored,) = Item.objects.scatter()
    assert stored.shelf == shelves[ONE]
    assert not Cover.objects.scatter().exists()


#: Each write relates an item whose key was not loaded to a row of ``NEAR``, on the same shard.
DEFERRED_WRITES: dict[str, Callable[[dict[int, Shelf], Item], Any]] = {
    "save": lambda shelves, item: _changed(item, shelf=shelves[NEAR]).save(),
    "bulk_update": lambda shelves, item: Item.objects.bulk_update(
        [_changed(item, shelf=shelves[NEAR])], ["shelf"]
    ),
    "bulk_update of a shard": lambda shelves, item: Item.objects.using(SHARD[ONE]).bulk_update(
        [_changed(item, shelf=shelves[NEAR])], ["shelf"]
    ),
    "update": lambda shelves, item: Item.objects.filter(owner=ONE).update(
        shelf=Shelf.objects.only("name").get(owner=NEAR)
    ),
    "update of several keys": lambda shelves, item: Item.objects.scatter().update(
        shelf=Shelf.objects.only("name").get(owner=NEAR)
    ),
    "add": lambda shelves, item: shelves[NEAR].items.add(item),
    "add, bulk=False": lambda shelves, item: shelves[NEAR].items.add(item, bulk=False),
    "many-to-many": lambda shelves, item: item.labels.add(
        Label.objects.create(id=8, name="label", owner=shelves[NEAR].owner)
    ),
}


@pytest.mark.parametrize("write", DEFERRED_WRITES.values(), ids=DEFERRED_WRITES)
def test_a_row_whose_key_was_not_loaded(
    shelves: dict[int, Shelf], write: Callable[[dict[int, Shelf], Item], Any]
) -> None:
    shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    with pytest.raises(CrossKeyRelation):
        write(shelves, Item.objects.only("name").get(owner=ONE))
    stored = Item.objects.get(owner=ONE)
    assert (stored.shelf, list(stored.labels.all())) == (shelves[ONE], [])
    # A row of its own key can be related, and reading sends no more queries than before.
    item = Item.objects.only("name").get(owner=ONE)
    item.shelf = shelves[ONE]
    item.save()
    with CaptureQueriesContext(connections["photos"]) as sent:
        list(shelves[ONE].items.only("name", "shelf"))
    assert len(sent) == 1


def test_a_key_that_was_not_loaded_is_looked_up_only_if_the_relation_is_written(
    shelves: dict[int, Shelf],
) -> None:
    shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    item = Item.objects.only("name", "shelf").select_related("shelf").get(owner=ONE)
    with CaptureQueriesContext(connections["photos"]) as sent:
        _changed(item, name="a").save(update_fields=["name"])
        Item.objects.bulk_update([_changed(item, name="b")], ["name"])
    assert sum(query["sql"].startswith("SELECT") for query in sent) == 0
    item.save()
    assert Item.objects.get(owner=ONE).name == "b"


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_update_of_values(shelves: dict[int, Shelf], key: int) -> None:
    shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    for rows in (Item.objects.scatter(), Item.objects.filter(owner__in=[ONE, 4])):
        with pytest.raises(CrossKeyRelation):
            rows.values("name").update(shelf=shelves[key])
    with pytest.raises(CrossKeyRelation):
        Item.objects.filter(pk=7, owner__in=[ONE]).values("name").annotate(
            number=Count("labels")
        ).update(shelf=shelves[key])


@pytest.mark.parametrize("key", [NEAR, TWO])
@pytest.mark.parametrize("by_pk", [False, True], ids=["instance", "primary key"])
@pytest.mark.parametrize("change", ["add", "set"])
def test_many_to_many(shelves: dict[int, Shelf], key: int, change: str, by_pk: bool) -> None:
    item = Item.objects.create(id=7, name="item", owner=shelves[ONE].owner, seller_id=ONE)
    label = Label.objects.create(id=8, name="label", owner=shelves[key].owner)
    other: Any = label.pk if by_pk else label
    # By its primary key, only the absence of a row of this key can be noticed.
    error = CrossShardRelation if by_pk else CrossKeyRelation
    with pytest.raises(error, match="the same shard key"):
        item.labels.add(other) if change == "add" else item.labels.set([other])
    through: Any = Item.labels.through
    with pytest.raises(CrossShardRelation):
        through(item=item, label=label).save()
    with pytest.raises(CrossShardRelation):
        through.objects.bulk_create([through(item=item, label=label)])
    assert not through.objects.scatter().exists()


@pytest.mark.parametrize("by_conditions", [False, True])
def test_update_of_an_automatic_table(shelves: dict[int, Shelf], by_conditions: bool) -> None:
    items = {
        key: Item.objects.create(id=key, name="item", owner=shelves[key].owner, seller_id=ONE)
        for key in (ONE, NEAR)
    }
    labels = {
        pk: Label.objects.create(id=pk, name="label", owner=shelves[key].owner)
        for pk, key in ((1, ONE), (2, ONE), (3, NEAR))
    }
    for key in (ONE, NEAR):
        items[key].labels.add(labels[key])
    through: Any = Item.labels.through
    of_shard = through.objects.using(SHARD[ONE])
    rows = through.objects.filter(item__owner=ONE) if by_conditions else of_shard
    for values in (
        {"label": labels[3]},
        {"item": items[NEAR]},
        {"item": items[ONE], "label": labels[3]},
    ):
        with pytest.raises(CrossKeyRelation, match="the same shard key"):
            rows.filter(item=ONE).update(**values)
    row = of_shard.get(item=ONE)
    row.label = labels[3]
    with pytest.raises(CrossKeyRelation, match="the same shard key"):
        row.save()
    assert rows.filter(item=ONE).update(label=labels[2]) == 1
    assert sorted(of_shard.values_list("item", "label")) == [(ONE, 2), (NEAR, 3)]


def test_nothing_is_sent_before_the_refusal(shelves: dict[int, Shelf]) -> None:
    rows = Item.objects.filter(owner=ONE)
    with CaptureQueriesContext(connections["photos"]) as sent, pytest.raises(CrossKeyRelation):
        rows.update(shelf=shelves[NEAR])
    with sent, pytest.raises(CrossKeyRelation):
        rows.get_or_create(owner_id=ONE, id=8, defaults={"shelf": shelves[NEAR], "seller_id": ONE})
    assert not sent.captured_queries


class ItemForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in the stubs only
    class Meta:
        model = Item
        fields = ["id", "name", "shelf", "owner", "stars", "posted_at", "seller"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shelves: Any = self.fields["shelf"]
        shelves.queryset = Shelf.objects.scatter()


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("key", [ONE, NEAR, TWO])
def test_a_form_reports_a_row_of_another_key(
    shelves: dict[int, Shelf], key: int, is_stored: bool
) -> None:
    item = shelves[ONE].items.create(id=7, name="item", seller_id=ONE) if is_stored else Item()
    data = {
        "id": 7,
        "name": "new",
        "owner": ONE,
        "stars": 0,
        "posted_at": "2026-01-01",
        "seller": ONE,
    }
    form = ItemForm({**data, "shelf": shelves[key].pk}, instance=item)
    assert form.is_valid() == (key == ONE), form.errors
    if key != ONE:
        assert list(form.errors) == ["shelf"]
        assert "not one of the available choices" in str(form.errors["shelf"])
    else:
        assert form.save().shelf == shelves[ONE]


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_a_form_reports_a_changed_key_together_with_a_row_of_that_key(
    shelves: dict[int, Shelf], key: int
) -> None:
    item = shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    data = {"id": 7, "name": "new", "stars": 0, "posted_at": "2026-01-01", "seller": ONE}
    form = ItemForm({**data, "owner": key, "shelf": shelves[key].pk}, instance=item)
    assert "owner" in form.errors
    assert Item.objects.get(owner=ONE).shelf == shelves[ONE]


def test_validation_looks_for_the_row_with_the_key(shelves: dict[int, Shelf]) -> None:
    item = shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    others = {field.name for field in Item._meta.fields} - {"shelf"}
    item.clean_fields(exclude=others)
    item.shelf_id = shelves[NEAR].pk
    with CaptureQueriesContext(connections["photos"]) as sent:
        with pytest.raises(ValidationError, match="shelf"):
            item.clean_fields(exclude=others)
    assert len(sent.captured_queries) == 1


def test_a_related_row_gets_the_key(shelves: dict[int, Shelf]) -> None:
    shelf = shelves[ONE]
    created = shelf.items.create(id=7, name="item", seller_id=ONE)
    again, is_new = shelf.items.get_or_create(id=7, defaults={"name": "item", "seller_id": ONE})
    assert (created.owner_id, again, is_new) == (ONE, created, False)
    updated, is_new = shelf.items.update_or_create(id=8, defaults={"name": "b", "seller_id": ONE})
    assert (updated.owner_id, is_new) == (ONE, True)
    label = created.labels.create(id=9, name="label")
    assert (label.owner_id, label.items.get()) == (ONE, created)
    child = created.children.create(id=10, name="child", seller_id=ONE)
    assert child.owner_id == ONE


def _relate_by_sql(row: Any, column: str, value: Any) -> None:
    """Relate a row as an earlier version of the library did, or a statement by hand."""
    with connections[SHARD[ONE]].cursor() as cursor:
        table, pk = row._meta.db_table, row._meta.pk.column
        cursor.execute(f"UPDATE {table} SET {column} = %s WHERE {pk} = %s", [value, row.pk])


def test_related_managers_read_rows_of_the_key_only(shelves: dict[int, Shelf]) -> None:
    item = shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    # A row that SQL has related, or an earlier version of the library.
    foreign = shelves[NEAR].items.create(id=8, name="foreign", seller_id=ONE)
    _relate_by_sql(foreign, "shelf_id", shelves[ONE].pk)
    assert list(shelves[ONE].items.all()) == [item]
    assert list(shelves[ONE].items.filter(owner=ONE)) == [item]
    assert shelves[ONE].items.update(name="renamed") == 1
    assert not shelves[ONE].items.filter(owner=NEAR).exists()
    for prefetch in ("items", Prefetch("items", Item.objects.order_by("-id"))):
        for rows in (Shelf.objects.filter(owner=ONE), Shelf.objects.scatter()):
            prefetched = {
                shelf.pk: list(shelf.items.all()) for shelf in rows.prefetch_related(prefetch)
            }
            assert prefetched[shelves[ONE].pk] == [item]


#: Each reads items of a shard in a way of its own; then their covers are looked at.
READS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda rows: rows,
    "select_related": lambda rows: rows.select_related("cover"),
    "prefetch_related": lambda rows: rows.prefetch_related("cover"),
    "Prefetch": lambda rows: rows.prefetch_related(Prefetch("cover", Cover.objects.all())),
    # The keys of the covers, of the items, and of both are not loaded.
    "only": lambda rows: rows.select_related("cover").only("name", "owner", "cover__name"),
    "defer": lambda rows: rows.defer("owner"),
    "defer both": lambda rows: rows.defer("owner").prefetch_related(
        Prefetch("cover", Cover.objects.defer("owner"))
    ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_one_to_one_relation_reads_a_row_of_the_key_only(
    shelves: dict[int, Shelf], read: Callable[[Any], Any]
) -> None:
    items = [shelves[ONE].items.create(id=pk, name="item", seller_id=ONE) for pk in (7, 8)]
    cover = Cover.objects.create(id=1, name="own", owner_id=ONE, item=items[0])
    foreign = Cover.objects.create(id=2, name="foreign", owner_id=NEAR)
    _relate_by_sql(foreign, "item_id", items[1].pk)
    for rows in (Item.objects.filter(owner=ONE), Item.objects.scatter()):
        first, second = read(rows.order_by("pk"))
        assert first.cover == cover
        for _ in range(2):
            assert not hasattr(second, "cover")
            with pytest.raises(Cover.DoesNotExist, match="Item has no cover"):
                _ = second.cover


def test_models_may_allow_other_keys(placed: None) -> None:
    assert not shard_options(Trunk).same_key  # type: ignore[union-attr]  # it is sharded
    keys = [0, 8]  # modulo 8: one shard
    trunk = Trunk.objects.create(id=1, owner=keys[0])
    twig = Twig.objects.create(id=2, owner=keys[1], parent=trunk)
    assert list(trunk.twigs.all()) == [twig]
