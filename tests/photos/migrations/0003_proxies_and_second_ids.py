import datetime
import django.db.models.deletion
import sharded_orm.models.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("photos_app", "0002_packed_and_timestamped_ids"),
    ]

    operations = [
        migrations.CreateModel(
            name="BoardProxy",
            fields=[],
            options={
                "proxy": True,
                "indexes": [],
                "constraints": [],
            },
            bases=("photos_app.board",),
        ),
        migrations.CreateModel(
            name="VisitProxy",
            fields=[],
            options={
                "proxy": True,
                "indexes": [],
                "constraints": [],
            },
            bases=("photos_app.visit",),
        ),
        migrations.CreateModel(
            name="Note",
            fields=[
                (
                    "id",
                    sharded_orm.models.fields.PackedIDField(
                        primary_key=True, serialize=False, type_id=4
                    ),
                ),
                ("text", models.CharField(max_length=100)),
                (
                    "stamp",
                    sharded_orm.models.fields.TimestampedIDField(
                        epoch=datetime.datetime(2025, 1, 1, 0, 0, tzinfo=datetime.UTC), unique=True
                    ),
                ),
                (
                    "board",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="notes",
                        to="photos_app.board",
                    ),
                ),
            ],
            options={
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="Tick",
            fields=[
                (
                    "id",
                    sharded_orm.models.fields.TimestampedIDField(
                        epoch=datetime.datetime(2025, 1, 1, 0, 0, tzinfo=datetime.UTC),
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "visit",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, to="photos_app.visit"
                    ),
                ),
            ],
            options={
                "abstract": False,
            },
        ),
    ]
