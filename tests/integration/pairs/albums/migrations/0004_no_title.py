from __future__ import annotations

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("albums", "0003_note")]

    operations = [migrations.RemoveField("album", "title")]
