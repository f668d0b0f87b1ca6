from django.db import migrations

import sharded_orm.models.fields


class Migration(migrations.Migration):
    dependencies = [
        ("sharded_orm_entities", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="indexstate",
            name="declaration",
            field=sharded_orm.models.fields.ExactCharField(default="", max_length=64),
        ),
    ]
