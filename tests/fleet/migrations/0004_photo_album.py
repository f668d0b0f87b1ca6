from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0003_photo_note")]

    operations = [
        migrations.AddField(
            "photo", "album", models.ForeignKey("fleet.album", models.CASCADE, null=True)
        ),
    ]
