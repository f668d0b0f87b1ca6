"""Every check reports its declaration, with its id and a hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import connection, models
from django.db.migrations.writer import MigrationWriter
from django.db.models import F
from django.db.models.functions import Lower
from django.test import override_settings
from django.test.utils import isolate_apps

from sharded_orm import on_delete
from sharded_orm.checks.models import check_models
from sharded_orm.checks.sqlite_files import check_autonomous_files, check_ticket_files
from sharded_orm.contrib.entities.tables import EntityTable
from sharded_orm.ids.layout import PackedLayout, TimestampedLayout
from sharded_orm.models import (
    ExactCharField,
    GlobalModel,
    PackedIDField,
    ShardedModel,
    TicketField,
    TimestampedIDField,
)
from sharded_orm.models.installation import _apps_of, check_contrib_apps, check_installation
from sharded_orm.models.relations.set_values import check_set_values
from tests.photos.models import Photo
from tests.pinboards.models import Board
from tests.versions import HAS_DATABASE_ON_DELETE


def ids(*classes: Any) -> set[str]:
    app_config = type("Config", (), {"get_models": staticmethod(lambda: classes)})()
    found = check_models([app_config])
    assert all(message.hint for message in found)
    return {str(message.id).removeprefix("sharded_orm.") for message in found}


class Base(ShardedModel):
    """The fields of every class below."""

    user_id = models.BigIntegerField()

    class Meta:
        abstract = True
        app_label = "photos_app"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"


def declare(body: Callable[[], type[Any]]) -> set[str]:
    with isolate_apps("tests.photos"):
        return ids(body())


def test_a_good_declaration_is_silent() -> None:
    def good() -> type[Any]:
        class Good(Base):
            id = TicketField(primary_key=True)
            slug = models.CharField(max_length=20)
            owner = models.ForeignKey(User, models.DO_NOTHING, db_constraint=False)

            class Meta(Base.Meta):
                abstract = False
                unique_together = [("user_id", "slug")]

        return Good

    assert declare(good) == set()


def test_missing_and_incomplete_shard_meta() -> None:
    def without() -> type[Any]:
        class Without(ShardedModel):
            class Meta:
                app_label = "photos_app"

        return Without

    def incomplete() -> type[Any]:
        class Incomplete(Base):
            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "photos"

        return Incomplete

    assert declare(without) == {"E001"}
    assert declare(incomplete) == {"E001"}


@pytest.mark.parametrize(
    ("group", "make", "expected"),
    [
        ("archive", lambda: models.BigIntegerField(), set()),
        ("archive", lambda: models.UUIDField(), set()),
        ("archive", lambda: ExactCharField(max_length=9), {"E083"}),
        ("archive", lambda: models.ForeignKey("Named", models.DO_NOTHING), {"E083"}),
        ("pins", lambda: ExactCharField(max_length=9), {"E083"}),
        ("events", lambda: ExactCharField(max_length=9), set()),
        ("photos", lambda: ExactCharField(max_length=9), set()),
    ],
)
def test_a_key_whose_type_the_strategy_cannot_place(
    group: str, make: Any, expected: set[str]
) -> None:
    def placed() -> type[Any]:
        class Named(GlobalModel):
            name = ExactCharField(max_length=9, primary_key=True)

            class Meta:
                app_label = "photos_app"

        class Placed(ShardedModel):
            id = TicketField(primary_key=True)
            key = make()
            ShardMeta = type("ShardMeta", (), {"group": group, "shard_key": "key"})

            class Meta:
                app_label = "photos_app"

        return Placed

    assert {one for one in declare(placed) if one.startswith("E08")} == expected


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"group": "nowhere", "shard_key": "user_id"}, {"E002", "W011"}),
        ({"group": "photos", "shard_key": "nothing"}, {"E003"}),
        ({"group": "photos", "shard_key": "many"}, {"E003"}),
        ({"group": "photos", "shard_key": "maybe"}, {"E004"}),
    ],
)
def test_wrong_groups_and_keys(meta: dict[str, str], expected: set[str]) -> None:
    def wrong() -> type[Any]:
        class Wrong(ShardedModel):
            user_id = models.BigIntegerField()
            maybe = models.BigIntegerField(null=True)
            many = models.ManyToManyField("self")
            ShardMeta = type("ShardMeta", (), meta)

            class Meta:
                app_label = "photos_app"

        return Wrong

    assert declare(wrong) - {"W011"} == expected - {"W011"}


def test_uniqueness_per_shard() -> None:
    def unique() -> type[Any]:
        class Unique(Base):
            email = models.CharField(max_length=20, unique=True)
            a = models.IntegerField()

            class Meta:
                app_label = "photos_app"
                unique_together = [("a", "email")]
                constraints = [models.UniqueConstraint(fields=["a"], name="only_a")]

        return Unique

    assert declare(unique) == {"W005", "W011"}


@pytest.mark.parametrize(
    ("expressions", "expected"),
    [
        (("user_id", Lower("name")), set()),
        ((F("user_id").desc(), Lower("name")), set()),
        ((F("user_id") % 2, "name"), {"W005"}),
        ((Lower("name"),), {"W005"}),
    ],
)
def test_unique_expressions_per_shard(expressions: tuple[Any, ...], expected: set[str]) -> None:
    def unique() -> type[Any]:
        class UniqueExpressions(Base):
            name = models.CharField(max_length=20)

            class Meta:
                app_label = "photos_app"
                constraints = [models.UniqueConstraint(*expressions, name="unique_expressions")]

        return UniqueExpressions

    assert declare(unique) - {"W011"} == expected


@pytest.mark.parametrize("option", ["unique_for_date", "unique_for_month", "unique_for_year"])
def test_unique_for_date_per_shard(option: str) -> None:
    def unique() -> type[Any]:
        class UniqueForDate(Base):
            day = models.DateField()
            name = models.CharField(max_length=20, **{option: "day"})

            class Meta:
                app_label = "photos_app"

        return UniqueForDate

    assert declare(unique) - {"W011"} == {"W005"}


def test_a_one_to_one_relation_inside_the_group_is_unique() -> None:
    def one_to_one() -> type[Any]:
        class OneToOne(Base):
            photo = models.OneToOneField(Photo, models.CASCADE)

            class Meta:
                app_label = "photos_app"

        return OneToOne

    assert declare(one_to_one) == {"W011"}


@pytest.mark.parametrize(("name", "expected"), [("photo", set()), ("author", {"E023"})])
def test_an_order_over_several_shards(name: str, expected: set[str]) -> None:
    def ordered() -> type[Any]:
        class Ordered(Base):
            photo = models.ForeignKey(Photo, models.CASCADE, related_name="+")
            author = models.ForeignKey(
                User, models.DO_NOTHING, db_constraint=False, related_name="+"
            )

            class Meta(Base.Meta):
                order_with_respect_to = name

        return Ordered

    assert declare(ordered) - {"W011"} == expected


def test_an_order_by_the_relation_that_is_the_key() -> None:
    def ordered() -> type[Any]:
        class Ordered(ShardedModel):
            author = models.ForeignKey(
                User, models.DO_NOTHING, db_constraint=False, related_name="+"
            )

            class Meta:
                app_label = "photos_app"
                order_with_respect_to = "author"

            class ShardMeta:
                group = "photos"
                shard_key = "author"

        return Ordered

    assert declare(ordered) == {"W011"}


@pytest.mark.parametrize(("name", "expected"), [("shelf", {"E023"}), ("user_id", set())])
def test_an_order_by_a_field_that_is_no_relation(name: str, expected: set[str]) -> None:
    def ordered() -> type[Any]:
        class Ordered(Base):
            shelf = models.BigIntegerField()

            class Meta(Base.Meta):
                order_with_respect_to = name

        return Ordered

    assert declare(ordered) - {"W011"} == expected


@pytest.mark.parametrize(("key", "expected"), [("user_id", {"W037"}), ("object_id", set())])
def test_an_order_by_a_generic_foreign_key(key: str, expected: set[str]) -> None:
    """It may refer to rows inside the group, which is right, or to rows outside of it."""

    def ordered() -> type[Any]:
        class Ordered(ShardedModel):
            user_id = models.BigIntegerField()
            content_type = models.ForeignKey(
                ContentType, models.DO_NOTHING, db_constraint=False, related_name="+"
            )
            object_id = models.BigIntegerField()
            content_object = GenericForeignKey()

            class Meta:
                app_label = "photos_app"
                order_with_respect_to = "content_object"

            class ShardMeta:
                group = "photos"
                shard_key = key

        return Ordered

    assert declare(ordered) - {"W011"} == expected


def test_foreign_keys_that_leave_the_group() -> None:
    def leaving() -> type[Any]:
        class Leaving(Base):
            id = TicketField(primary_key=True)
            owner = models.ForeignKey(User, models.CASCADE)

            class Meta:
                app_label = "photos_app"

        return Leaving

    def from_global() -> type[Any]:
        class Sharded(Base):
            id = TicketField(primary_key=True)

            class Meta:
                app_label = "photos_app"

        class Global(GlobalModel):
            sharded = models.ForeignKey(Sharded, models.SET_NULL, null=True, db_constraint=False)

            class Meta:
                app_label = "photos_app"

        return Global

    assert declare(leaving) == {"E006", "E007"}
    assert declare(from_global) == {"E007"}


def test_policies_are_for_foreign_keys_from_shards_to_global_models() -> None:
    def to_global() -> type[Any]:
        class Owned(Base):
            id = TicketField(primary_key=True)
            owner = models.ForeignKey(User, on_delete.CASCADE, db_constraint=False)
            agent = models.ForeignKey(
                User, on_delete.PROTECT, db_constraint=False, related_name="+"
            )
            former = models.ForeignKey(User, on_delete.LEAVE, db_constraint=False, related_name="+")
            editor = models.ForeignKey(
                User, on_delete.SET_NULL, db_constraint=False, null=True, related_name="+"
            )

            class Meta:
                app_label = "photos_app"

        return Owned

    def not_nullable() -> type[Any]:
        class NotNullable(Base):
            id = TicketField(primary_key=True)
            owner = models.ForeignKey(User, on_delete.SET_NULL, db_constraint=False)

            class Meta:
                app_label = "photos_app"

        return NotNullable

    def inside() -> type[Any]:
        class Inside(Base):
            id = TicketField(primary_key=True)
            parent = models.ForeignKey("self", on_delete.CASCADE)

            class Meta:
                app_label = "photos_app"

        return Inside

    def global_only() -> type[Any]:
        class OnlyGlobal(GlobalModel):
            owner = models.ForeignKey(User, on_delete.PROTECT)

            class Meta:
                app_label = "photos_app"

        return OnlyGlobal

    assert declare(to_global) == set()
    assert declare(not_nullable) == {"E007"}
    assert declare(inside) == {"E007"}
    assert declare(global_only) == {"E007"}


def _on_delete_of_key(*policies: Any) -> dict[str, set[str]]:
    def keyed(policy: Any) -> Callable[[], type[Any]]:
        def body() -> type[Any]:
            class Keyed(Base):
                id = TicketField(primary_key=True)

                class Meta:
                    app_label = "photos_app"

            class Part(Base):
                id = TicketField(primary_key=True)
                whole = models.ForeignKey(Keyed, policy, default=1, db_default=1)
                other = models.ForeignKey(Keyed, policy, null=True, related_name="+")

                class Meta:
                    app_label = "photos_app"

                class ShardMeta:
                    group = "photos"
                    shard_key = "whole"

            return Part

        return body

    return {str(getattr(p, "__name__", p)): declare(keyed(p)) for p in policies}


def test_no_deletion_writes_another_shard_key() -> None:
    for policies, expected in (
        ((models.CASCADE, models.PROTECT, models.RESTRICT, models.DO_NOTHING), set()),
        ((models.SET_NULL, models.SET_DEFAULT, models.SET(5), models.SET(int)), {"E080"}),
    ):
        for policy in policies:
            assert list(_on_delete_of_key(policy).values()) == [expected]


@pytest.mark.skipif(not HAS_DATABASE_ON_DELETE, reason="of Django 6.1")
def test_nor_does_one_of_the_database() -> None:
    names = ("DB_CASCADE", "DB_SET_NULL", "DB_SET_DEFAULT")
    found = _on_delete_of_key(*(getattr(models, name) for name in names))
    assert {name for name, messages in found.items() if "E080" in messages} == {*names[1:]}


def test_nor_does_a_policy() -> None:
    def owned() -> type[Any]:
        class Owned(Base):
            id = TicketField(primary_key=True)
            user = models.ForeignKey(User, on_delete.SET_NULL, db_constraint=False)

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "photos"
                shard_key = "user"

        return Owned

    assert declare(owned) == {"E080"}


def test_many_to_many_across() -> None:
    def across() -> type[Any]:
        class Across(Base):
            id = TicketField(primary_key=True)
            likes = models.ManyToManyField(User)

            class Meta:
                app_label = "photos_app"

        return Across

    assert declare(across) == {"E008"}


def test_composite_keys() -> None:
    def composite(*names: str) -> Callable[[], type[Any]]:
        def body() -> type[Any]:
            class Composite(Base):
                pk = models.CompositePrimaryKey(*names)
                a = models.IntegerField()
                b = models.IntegerField()

                class Meta:
                    app_label = "photos_app"

            return Composite

        return body

    assert declare(composite("a", "b")) == {"E009"}
    assert declare(composite("user_id", "a")) == set()


def test_the_router_is_missing() -> None:
    def good() -> type[Any]:
        class Good(Base):
            id = TicketField(primary_key=True)

            class Meta:
                app_label = "photos_app"

        return Good

    with override_settings(DATABASE_ROUTERS=[]):
        assert declare(good) == {"E010"}


def test_shard_meta_is_inherited_like_meta() -> None:
    with isolate_apps("tests.photos"):

        class Parent(Base):
            class Meta:
                app_label = "photos_app"

        class Child(Parent):
            extra = models.IntegerField()

            class Meta:
                app_label = "photos_app"

        class Proxy(Parent):
            class Meta:
                app_label = "photos_app"
                proxy = True

        assert Parent._shard_options().group == "photos"
        assert Child._shard_options().key is Parent._meta.get_field("user_id")
        assert Proxy._shard_options().group == "photos"


def test_one_table_with_two_keys_is_an_error() -> None:
    def child() -> type[Any]:
        class Parent(Base):
            id = TicketField(primary_key=True)

            class Meta:
                app_label = "photos_app"

        class Child(Parent):
            other_id = models.BigIntegerField()

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "photos"
                shard_key = "other_id"

        return Child

    assert "E012" in declare(child)


def test_a_default_manager_that_does_not_route_is_an_error() -> None:
    def plain() -> type[Any]:
        class Plain(Base):
            id = TicketField(primary_key=True)
            objects = models.Manager()

            class Meta:
                app_label = "photos_app"

        return Plain

    assert declare(plain) == {"E013"}


def test_sqlite_has_one_writer_per_file() -> None:
    assert check_autonomous_files() == []
    changed = {**settings.SHARDED_ORM, "DIRECTORY": "default", "TICKETS": ["default"]}
    with override_settings(SHARDED_ORM=changed):
        if settings.DATABASES["default"]["ENGINE"].endswith("sqlite3"):
            assert [m.id for m in check_autonomous_files()] == ["sharded_orm.W014"] * 2


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"transaction_mode": "IMMEDIATE"}, ["sharded_orm.W019"]),
        ({"transaction_mode": "DEFERRED"}, []),
        ({}, []),
    ],
)
def test_a_transaction_mode_of_a_ticket_file(
    options: dict[str, str], ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": options}
    monkeypatch.setitem(settings.DATABASES, "tickets_1", entry)
    assert [message.id for message in check_ticket_files()] == ids


def packed(group: str, key: str = "id", **options: Any) -> Callable[[], type[Any]]:
    def body() -> type[Any]:
        class Packed(ShardedModel):
            id = PackedIDField(primary_key=True, **options)
            user_id = models.BigIntegerField()
            ShardMeta = type("ShardMeta", (), {"group": group, "shard_key": key})

            class Meta:
                app_label = "photos_app"

        return Packed

    return body


def timestamped(group: str, key: str, **options: Any) -> Callable[[], type[Any]]:
    def body() -> type[Any]:
        class Timestamped(ShardedModel):
            id = TimestampedIDField(primary_key=True, **options)
            user_id = models.BigIntegerField()
            ShardMeta = type("ShardMeta", (), {"group": group, "shard_key": key})

            class Meta:
                app_label = "photos_app"

        return Timestamped

    return body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (packed("pins", type_id=1), set()),
        (packed("pins", "user_id", type_id=1023), set()),
        (packed("photos", type_id=1), {"E015"}),
        (packed("photos", "user_id", type_id=1), {"E015"}),
        (packed("visits", type_id=1), {"E015"}),
        (packed("pins", type_id=1, layout=PackedLayout(16, 9, 37)), set()),
        (packed("pins", type_id=1, layout=PackedLayout(16, 9, 36)), {"E015"}),
        (packed("pins", type_id=1024), {"E016"}),
        (packed("pins", type_id=-1), {"E016"}),
        (packed("pins", type_id=True), {"E016"}),
        (packed("pins", type_id="1"), {"E016"}),
        (packed("pins", type_id=1, layout=PackedLayout(2, 10, 36)), {"E015", "E018"}),
        (timestamped("visits", "id"), set()),
        (timestamped("visits", "id", layout=TimestampedLayout(sequence_bits=9)), {"E015"}),
        (timestamped("events", "id"), {"E015"}),
        (timestamped("events", "user_id"), set()),
        (timestamped("photos", "user_id", layout=TimestampedLayout(shard_bits=3)), {"E018"}),
    ],
)
def test_ids_that_carry_their_shard(body: Callable[[], type[Any]], expected: set[str]) -> None:
    assert declare(body) == expected


def test_ids_that_carry_a_shard_outside_of_shards() -> None:
    def plain() -> type[Any]:
        class Plain(GlobalModel):
            id = TimestampedIDField(primary_key=True)

            class Meta:
                app_label = "photos_app"

        return Plain

    assert declare(plain) == {"E015"}


def test_two_models_with_one_type_id() -> None:
    with isolate_apps("tests.photos"):
        one, other = (
            type(
                name,
                (ShardedModel,),
                {
                    "__module__": "tests.photos.models",
                    "id": PackedIDField(primary_key=True, type_id=7),
                    "Meta": type("Meta", (), {"app_label": "photos_app"}),
                    "ShardMeta": type("ShardMeta", (), {"group": group, "shard_key": "id"}),
                },
            )
            for name, group in (("One", "pins"), ("Other", "pins"))
        )
        assert ids(one) == ids(other) == ids(one, other) == {"E017"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {"E021"}), ({"unique": True}, set()), ({"primary_key": True}, set())],
)
def test_a_timestamped_id_is_unique(options: dict[str, Any], expected: set[str]) -> None:
    def body() -> type[Any]:
        fields: dict[str, Any] = {"stamp": TimestampedIDField(**options)}
        if "primary_key" not in options:
            fields["id"] = TicketField(primary_key=True)
        meta = type("Meta", (), {"app_label": "photos_app"})
        return type(
            "Stamped", (Base,), {"__module__": "tests.photos.models", "Meta": meta, **fields}
        )

    assert declare(body) == expected


@pytest.mark.parametrize("enforced", [True, False])
def test_a_foreign_key_inside_a_group_that_nothing_enforces(enforced: bool) -> None:
    with isolate_apps("tests.photos"):
        meta = {"Meta": type("Meta", (), {"app_label": "photos_app"})}
        parent: Any = type(
            "Parent",
            (Base,),
            {"__module__": "tests.photos.models", "id": TicketField(primary_key=True), **meta},
        )
        child = type(
            "Child",
            (Base,),
            {
                "__module__": "tests.photos.models",
                "id": TicketField(primary_key=True),
                "parent": models.ForeignKey(parent, models.CASCADE, db_constraint=enforced),
                **meta,
            },
        )
        assert ids(child) == (set() if enforced else {"W020"})


@pytest.mark.parametrize(
    ("base", "unique_everywhere", "expected"),
    [
        (GlobalModel, False, {"W011", "E022"}),
        (GlobalModel, True, set()),
        (Base, False, {"W011"}),
    ],
)
def test_a_generic_relation_that_leaves_the_group(
    base: Any, unique_everywhere: bool, expected: set[str]
) -> None:
    with isolate_apps("tests.photos"):
        common = {
            "__module__": "tests.photos.models",
            "Meta": type("Meta", (), {"app_label": "photos_app"}),
        }
        content_type = models.ForeignKey(ContentType, models.DO_NOTHING, db_constraint=False)
        values = {
            "id": TicketField(primary_key=True),
            "content_type": content_type,
            "object_id": models.BigIntegerField(),
            "content_object": GenericForeignKey(),
        }
        remark: Any = type("Remark", (base,), {**values, **common})
        relation: dict[str, Any] = {"remarks": GenericRelation(remark)}
        if unique_everywhere:
            relation["id"] = TicketField(primary_key=True)
        assert ids(type("Subject", (Base,), {**relation, **common})) == expected
        assert ids(remark) == set()


def test_a_shard_key_that_is_the_key_of_its_parent_needs_no_constraint() -> None:
    with isolate_apps("tests.photos"):
        attrs = {
            "__module__": "tests.photos.models",
            "Meta": type("Meta", (), {"app_label": "photos_app"}),
        }
        parent: Any = type(
            "Parent",
            (ShardedModel,),
            {
                **attrs,
                "id": PackedIDField(primary_key=True, type_id=8),
                "ShardMeta": type("ShardMeta", (), {"group": "pins", "shard_key": "id"}),
            },
        )
        child = type(
            "Child",
            (ShardedModel,),
            {
                **attrs,
                "id": PackedIDField(primary_key=True, type_id=9),
                "parent": models.ForeignKey(parent, models.CASCADE, db_constraint=False),
                "ShardMeta": type("ShardMeta", (), {"group": "pins", "shard_key": "parent"}),
            },
        )
        assert ids(child) == set()


@pytest.mark.every_backend
def test_a_key_of_text_with_a_collation_that_takes_two_for_one() -> None:
    # The name of a collation of PostgreSQL does not tell; the server is asked before the first query.
    wrong, right = {
        "mysql": (
            ["utf8mb4_general_ci", "utf8mb4_bin"],
            [None, "utf8mb4_nopad_bin", "utf8mb4_0900_bin"],
        ),
        "sqlite": (["NOCASE", "rtrim"], [None, "binary"]),
        "postgresql": ([], [None, "C"]),
    }[connection.vendor]

    def keyed(key: Any) -> type[Any]:
        class Keyed(ShardedModel):
            id = TicketField(primary_key=True)
            name = key

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "events"
                shard_key = "name"

        return Keyed

    for kind in (models.CharField, models.EmailField, models.SlugField, models.TextField):
        for collation in wrong:
            key = kind(max_length=20, db_collation=collation)
            assert declare(lambda key=key: keyed(key)) == {"E050"}
        for collation in right:
            key = kind(max_length=20, db_collation=collation)
            assert declare(lambda key=key: keyed(key)) == set()
    assert declare(lambda: keyed(ExactCharField(max_length=20))) == set()
    assert declare(lambda: keyed(models.UUIDField())) == set()

    def beside() -> type[Any]:
        class Owner(ShardedModel):
            name = models.CharField(max_length=20, primary_key=True, db_collation=wrong[0])

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "events"
                shard_key = "name"

        class Owned(ShardedModel):
            id = TicketField(primary_key=True)
            owner = models.ForeignKey(Owner, models.CASCADE)

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "events"
                shard_key = "owner"

        return Owned

    assert declare(beside) == {"E050"}


def test_shard_meta_of_a_model_that_is_not_sharded() -> None:
    def forgotten() -> type[Any]:
        class Forgotten(models.Model):
            user_id = models.BigIntegerField()

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "photos"
                shard_key = "user_id"

        return Forgotten

    assert declare(forgotten) == {"E077"}


def test_shard_meta_of_a_global_model_may_stand() -> None:
    def cached() -> type[Any]:
        class Cached(GlobalModel):
            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                cache = True

        return Cached

    assert declare(cached) == set()


def test_the_app_is_not_installed() -> None:
    assert check_installation() == []
    installed = [app for app in settings.INSTALLED_APPS if not app.startswith("sharded_orm")]
    with override_settings(INSTALLED_APPS=installed):
        (message,) = check_installation()
    assert message.id == "sharded_orm.E078"
    assert "cache, mirrors and lookups are not kept up to date" in message.msg
    assert message.hint


def test_an_app_whose_models_are_used_is_not_installed() -> None:
    assert check_contrib_apps() == []
    installed = [app for app in settings.INSTALLED_APPS if "sharded_orm.contrib." not in app]
    with override_settings(INSTALLED_APPS=installed):
        found = check_contrib_apps()
    assert {message.id for message in found} == {"sharded_orm.E081"}
    hints = {str(message.hint): message.obj for message in found}
    assert hints["Add 'sharded_orm.contrib.objects' to INSTALLED_APPS."] is Board


def test_a_table_of_entities_needs_their_app() -> None:
    assert _apps_of(EntityTable) == {"sharded_orm.contrib.entities"}


@override_settings(SHARDED_ORM={**settings.SHARDED_ORM, "TICKETS": []})
def test_ticket_field_without_ticket_servers() -> None:
    assert ids(Photo) == {"W079"}


class Guard:
    """Wraps an ``on_delete``, as django-polymorphic does, and has no name."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def __call__(self, *args: Any) -> None:
        self.action(*args)


def test_a_wrapped_on_delete_is_that_function() -> None:
    def guarded(policy: Any) -> Callable[[], type[Any]]:
        def body() -> type[Any]:
            class Paper(Base):
                id = TicketField(primary_key=True)
                writer = models.ForeignKey(User, Guard(policy), null=True, db_constraint=False)

            return Paper

        return body

    assert declare(guarded(models.DO_NOTHING)) == set()
    assert declare(guarded(models.CASCADE)) == {"E007"}
    for policy in (models.SET_NULL, models.SET_DEFAULT, models.SET(5)):
        assert list(_on_delete_of_key(Guard(policy)).values()) == [{"E080"}]


def _nobody() -> None:
    return None


@isolate_apps("tests.photos")
def test_a_wrapped_set_is_written_into_migrations_as_set() -> None:
    class Paper(Base):
        id = TicketField(primary_key=True)
        other = models.ForeignKey("self", Guard(models.SET(_nobody)), null=True)

        class Meta(Base.Meta):
            abstract = False

    policy: Any = Paper._meta.get_field("other").remote_field
    text, _ = MigrationWriter.serialize(policy.on_delete)
    assert text == f"models.SET({__name__}._nobody)"
    before = policy.on_delete
    check_set_values(Paper._meta.get_field("other"))  # as if a relation was added later
    assert policy.on_delete is before


def test_an_on_delete_without_a_name_is_reported() -> None:
    class Own:
        def __call__(self, *args: Any) -> None:
            pass

    def own() -> type[Any]:
        class Paper(Base):
            id = TicketField(primary_key=True)
            writer = models.ForeignKey(User, Own(), db_constraint=False)

        return Paper

    assert declare(own) == {"E007"}
