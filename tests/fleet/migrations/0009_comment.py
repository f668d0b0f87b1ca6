from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0008_positive_width")]

    operations = [
        migrations.CreateModel(
            "Comment",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
                ("text", models.CharField(max_length=500)),
                ("photo", models.ForeignKey("fleet.photo", models.CASCADE)),
            ],
        ),
    ]
