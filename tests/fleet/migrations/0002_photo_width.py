from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0001_initial")]

    operations = [
        migrations.AddField("photo", "width", models.IntegerField(default=0)),
    ]
