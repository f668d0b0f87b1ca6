from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0002_photo_width")]

    operations = [
        migrations.AddField("photo", "note", models.TextField(null=True)),
    ]
