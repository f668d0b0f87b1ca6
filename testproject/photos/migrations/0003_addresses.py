import sharded_orm.models.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("photos", "0002_tags_and_written_comments")]

    operations = [
        migrations.CreateModel(
            name="PhotoAddress",
            fields=[
                ("lookup", sharded_orm.models.fields.ExactCharField(max_length=200)),
                ("value", sharded_orm.models.fields.ExactCharField(max_length=255)),
                ("slot", sharded_orm.models.fields.ExactCharField(max_length=64)),
                ("key", sharded_orm.models.fields.ExactCharField(max_length=100)),
                ("token", sharded_orm.models.fields.ExactCharField(max_length=32)),
                ("is_open", models.BooleanField()),
                ("writer", sharded_orm.models.fields.ExactCharField(max_length=64)),
                ("written_at", models.FloatField()),
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
            ],
            options={
                "verbose_name_plural": "photo addresses",
                "abstract": False,
                "indexes": [models.Index(fields=["token"], name="photos_photoaddress_token")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("lookup", "value", "slot"), name="photos_photoaddress_row"
                    )
                ],
            },
        ),
        migrations.DeleteModel(name="PhotoOwner"),
    ]
