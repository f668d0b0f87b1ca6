from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0020_verbose_name")]

    operations = [
        migrations.CreateModel(
            "Temporary",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
                ("photo", models.ForeignKey("fleet.photo", models.CASCADE)),
            ],
        ),
    ]
