from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0013_remark_number")]

    operations = [
        migrations.CreateModel(
            "Tag",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("user_id", models.BigIntegerField()),
                ("word", models.CharField(max_length=50)),
            ],
        ),
        migrations.AddField("photo", "tags", models.ManyToManyField("fleet.tag")),
    ]
