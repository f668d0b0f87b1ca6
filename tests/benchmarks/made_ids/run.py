"""Inserts whose ids PostgreSQL makes, against the sequence of stock Django."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.db import connections, transaction

import sharded_orm
from tests.benchmarks.made_ids.models import Counted, Packed, Stamped, StampedByStock
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import START, Site
from tests.benchmarks.timing import Rounds, compare

CALLS = 60
VALUES = {"title": "A photo", "posted_at": START, "stars": 3}


def made_ids(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time ``create()`` of a row on one shard, alone and in a transaction."""
    for model, user, shard in ((Stamped, 5, "uploads_00005"), (Packed, 1, "packed_00000")):
        stock = site.stock(shard)
        _create_tables(model, shard, stock)
        kind = model._meta.pk.__class__.__name__
        ours, plain = model.objects, Counted.objects.using(stock)
        if model is Stamped:
            yield _id_alone(stock, rounds)

        def create_ours(ours: Any = ours, user: int = user) -> None:
            ours.create(user_id=user, **VALUES)

        def create_plain(plain: Any = plain, user: int = user) -> None:
            plain.create(user_id=user, **VALUES)

        yield at_most(
            1.2,
            f"create() with the id of the database, {kind}",
            "stock with the sequence's default",
            compare(create_ours, create_plain, rounds, number=CALLS),
        )

        def block_of_ours(model: Any = model, user: int = user) -> None:
            with sharded_orm.atomic(model, user_id=user):
                model.objects.create(user_id=user, **VALUES)

        def plain_block(stock: str = stock, plain: Any = plain, user: int = user) -> None:
            with transaction.atomic(using=stock):
                plain.create(user_id=user, **VALUES)

        yield at_most(
            1.2,
            f"  the same in atomic(), {kind}",
            "stock in atomic()",
            compare(block_of_ours, plain_block, rounds, number=CALLS),
            goal=False,
        )


def _id_alone(stock: str, rounds: Rounds) -> Line:
    """Compare both defaults without the library, which also routes and checks each row."""
    with_function, with_sequence = (
        model.objects.using(stock) for model in (StampedByStock, Counted)
    )
    return at_most(
        1.2,
        "stock create(), the column's default is the function of TimestampedIDField",
        "stock with the sequence's default",
        compare(
            lambda: with_function.create(user_id=5, **VALUES),
            lambda: with_sequence.create(user_id=5, **VALUES),
            rounds,
            number=CALLS,
        ),
    )


def _create_tables(model: Any, shard: str, stock: str) -> None:
    """Create both tables in the schema of the shard, and do what follows ``migrate``."""
    from sharded_orm.models.after_migrate import auto_increment, postgresql_defaults

    with connections[shard].schema_editor() as editor:
        editor.create_model(model)
    for receiver in (auto_increment, postgresql_defaults):
        receiver.after_migrate(apps.get_app_config("made_ids"), using=shard)
    with connections[stock].schema_editor() as editor:
        editor.create_model(Counted)
