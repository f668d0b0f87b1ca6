from __future__ import annotations

import os
from typing import Any

from django.db import migrations, models


def fail(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.alias == os.environ.get("FAIL_ON"):
        raise ValueError("the disk is full")


class Migration(migrations.Migration):
    initial = True
    dependencies = []

    operations = [
        migrations.CreateModel(
            "Entry",
            [
                ("entry_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
            ],
        ),
        migrations.RunPython(fail, migrations.RunPython.noop, hints={"model_name": "entry"}),
    ]
