from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0016_no_width")]

    operations = [
        migrations.AddField("photo", "height", models.PositiveIntegerField(default=1)),
    ]
