from django.db import migrations, models

import sharded_orm.models.fields


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="IndexState",
            fields=[
                (
                    "index",
                    sharded_orm.models.fields.ExactCharField(
                        max_length=200, primary_key=True, serialize=False
                    ),
                ),
                ("state", sharded_orm.models.fields.ExactCharField(max_length=16)),
                ("since", models.DateTimeField()),
            ],
            options={
                "db_table": "sharded_orm_entity_index",
                "default_permissions": (),
            },
        ),
    ]
