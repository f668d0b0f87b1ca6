from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0011_remark")]

    operations = [
        migrations.AlterField("album", "name", models.CharField(max_length=100)),
        migrations.AddConstraint(
            "album", models.UniqueConstraint(fields=["user_id", "name"], name="fleet_album_name")
        ),
    ]
