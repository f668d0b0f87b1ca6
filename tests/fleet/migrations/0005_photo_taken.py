from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0004_photo_album")]

    operations = [
        migrations.AddField("photo", "taken", models.DateTimeField(null=True)),
    ]
