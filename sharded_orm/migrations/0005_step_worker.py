from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("sharded_orm", "0004_exact_text"),
    ]

    operations = [
        migrations.AddField(
            model_name="operationstep",
            name="worker",
            field=models.BigIntegerField(null=True),
        ),
    ]
