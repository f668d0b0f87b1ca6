from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Decision",
            fields=[
                (
                    "name",
                    models.CharField(max_length=64, primary_key=True, serialize=False),
                ),
                ("decided_at", models.BigIntegerField()),
            ],
            options={
                "db_table": "sharded_orm_decision",
                "default_permissions": (),
            },
        ),
    ]
