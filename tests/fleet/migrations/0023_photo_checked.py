from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0022_no_temporary")]

    operations = [
        migrations.AddField("photo", "checked", models.BooleanField(default=False)),
    ]
