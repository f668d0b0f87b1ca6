"""Migrations of every kind, and checks of their effects on a shard.

Each operation that changes rows adds words to a log table, so that a second run of the operation
shows. The app is ``shop`` of :mod:`tests.integration.migrate.fleet_project`.
"""

from __future__ import annotations

from tests.integration.migrate.fleet_project import Fleet

MODELS = """
from django.db import models
from sharded_orm import ShardedModel

class OnShop(ShardedModel):
    user_id = models.BigIntegerField()

    class Meta:
        abstract = True

    class ShardMeta:
        group = "shop"
        shard_key = "user_id"

class Log(OnShop):
    word = models.CharField(max_length=50)

class Order(OnShop):
    name = models.CharField(max_length=80)
    note = models.CharField(max_length=20, default="n")
    mark = models.IntegerField(default=7)
    size = models.IntegerField(default=0)

    class Meta:
        verbose_name = "purchase"
        indexes = [models.Index(fields=["user_id", "mark"], name="shop_by_mark")]

class Item(OnShop):
    order = models.ForeignKey(Order, models.CASCADE)
    number = models.IntegerField(default=0)

    class Meta:
        db_table = "shop_things"
        unique_together = [("user_id", "order", "number")]
"""

_HEAD = """
from django.db import migrations, models

def say(apps, schema_editor, *words):
    rows = apps.get_model("shop", "Log").objects.using(schema_editor.connection.alias)
    for word in words:
        rows.create(user_id=1, word=word)

def fill(apps, schema_editor):
    say(apps, schema_editor, "python a", "python b")

def loose(apps, schema_editor):
    say(apps, schema_editor, "loose a", "loose b")

def tight(apps, schema_editor):
    say(apps, schema_editor, "tight a", "tight b")

def commits(apps, schema_editor):
    say(apps, schema_editor, "commits a")
    with schema_editor.connection.cursor() as cursor:
        # MySQL commits before it; an editor would refuse that.
        cursor.execute("CREATE TABLE shop_side (id integer PRIMARY KEY)")
    say(apps, schema_editor, "commits b")

def _id():
    return ("id", models.BigAutoField(
        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
    ))

class Migration(migrations.Migration):
    dependencies = {dependencies!r}
    atomic = {atomic!r}
    operations = [{operations}]
"""

_SAYS = "INSERT INTO shop_log (user_id, word) VALUES (1, "
_MIGRATIONS = {
    "0001_first": """
        migrations.CreateModel("Order", [
            _id(),
            ("user_id", models.BigIntegerField()),
            ("title", models.CharField(max_length=50)),
            ("old", models.IntegerField(null=True)),
        ]),
        migrations.CreateModel("Log", [
            _id(),
            ("user_id", models.BigIntegerField()),
            ("word", models.CharField(max_length=50)),
        ]),
        migrations.CreateModel("Gone", [_id(), ("user_id", models.BigIntegerField())]),
    """,
    "0002_columns": """
        migrations.AddField("order", "note", models.CharField(max_length=20, default="n")),
        migrations.AddField("order", "mark", models.IntegerField(null=True)),
        migrations.AlterField("order", "mark", models.IntegerField(default=7)),
        migrations.AddIndex("order", models.Index(fields=["user_id", "mark"], name="shop_mark")),
        migrations.AlterModelOptions("order", {"verbose_name": "purchase"}),
    """,
    "0003_words": f"""
        migrations.RunPython(fill, migrations.RunPython.noop),
        migrations.AddField("order", "size", models.IntegerField(default=0)),
        migrations.RunSQL(
            [
                "{_SAYS}'sql a')",
                ("{_SAYS}%s)", ["sql b"]),
                "UPDATE shop_order SET size = size + 1",
                "CREATE INDEX shop_by_title ON shop_order (title)",
            ],
            migrations.RunSQL.noop,
        ),
        migrations.AlterField("order", "title", models.CharField(max_length=80)),
    """,
    "0004_loose": f"""
        migrations.RunPython(loose, migrations.RunPython.noop, atomic=False),
        migrations.RunPython(tight, migrations.RunPython.noop, atomic=True),
        migrations.AlterField("order", "old", models.BigIntegerField(null=True)),
        migrations.RunSQL("{_SAYS}'sql c')", migrations.RunSQL.noop),
        migrations.AddField("order", "extra", models.IntegerField(default=1)),
    """,
    "0005_commits": """
        migrations.RunPython(commits, migrations.RunPython.noop),
        migrations.RemoveField("order", "extra"),
    """,
    "0006_models": """
        migrations.CreateModel("Item", [
            _id(),
            ("user_id", models.BigIntegerField()),
            ("order", models.ForeignKey("shop.order", models.CASCADE)),
        ]),
        migrations.AddField("item", "number", models.IntegerField(default=0)),
        migrations.AlterUniqueTogether("item", {("user_id", "order", "number")}),
        migrations.RenameField("order", "title", "name"),
        migrations.AlterModelTable("item", "shop_things"),
        migrations.RenameIndex("order", new_name="shop_by_mark", old_name="shop_mark"),
        migrations.RemoveField("order", "old"),
        migrations.DeleteModel("Gone"),
    """,
    "0007_nothing": 'migrations.AlterModelOptions("log", {}),',
}
# Migrations without a transaction around them, on backends that would have one.
_NOT_ATOMIC = {"0004_loose"}

#: The log of every shard after all migrations.
WORDS = [
    *("commits a", "commits b", "loose a", "loose b", "python a", "python b"),
    *("sql a", "sql b", "sql c", "tight a", "tight b"),
]
#: Operations that may be unclear after a kill -> the words that they log.
UNCLEAR = {
    "0004_loose": ("loose a", "loose b"),
    "0005_commits": ("commits a", "commits b"),
}
#: A table that 0005_commits creates in the middle of its rows.
SIDE = "shop_side"


def write(fleet: Fleet) -> None:
    """Replace the models and migrations of ``fleet``."""
    fleet.write("shop/models.py", MODELS)
    dependencies: list[tuple[str, str]] = []
    for name, operations in _MIGRATIONS.items():
        text = _HEAD.replace("{dependencies!r}", repr(dependencies))
        text = text.replace("{atomic!r}", repr(name not in _NOT_ATOMIC))
        fleet.write(f"shop/migrations/{name}.py", text.replace("{operations}", operations))
        dependencies = [("shop", name)]
