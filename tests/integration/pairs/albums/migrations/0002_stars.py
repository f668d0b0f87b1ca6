from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("albums", "0001_initial")]

    operations = [migrations.AddField("album", "stars", models.IntegerField(default=5))]
