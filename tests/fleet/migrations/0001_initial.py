from django.db import migrations, models
from sharded_orm.models.fields import PackedIDField


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            "Album",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
                ("name", models.CharField(max_length=60)),
            ],
        ),
        migrations.CreateModel(
            "Photo",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
                ("title", models.CharField(max_length=100)),
                ("path", models.CharField(max_length=255)),
                ("stars", models.IntegerField(default=0, db_index=True)),
            ],
        ),
        migrations.CreateModel(
            "Receipt",
            [
                ("id", PackedIDField(primary_key=True, serialize=False, type_id=3)),
                ("user_id", models.BigIntegerField()),
            ],
        ),
    ]
