from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0014_tag")]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.AlterField(
                    "photo", "stars", models.BigIntegerField(default=0, db_index=True)
                )
            ],
            state_operations=[
                migrations.AlterField(
                    "photo", "stars", models.BigIntegerField(default=0, db_index=True)
                )
            ],
        ),
    ]
