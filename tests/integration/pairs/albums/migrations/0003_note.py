from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("albums", "0002_stars")]

    operations = [
        migrations.AddField("album", "note", models.CharField(max_length=20, null=True)),
        migrations.AddIndex("album", models.Index(fields=["user_id"], name="album_by_user")),
        migrations.CreateModel(
            "Tag",
            [
                ("tag_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
            ],
        ),
    ]
