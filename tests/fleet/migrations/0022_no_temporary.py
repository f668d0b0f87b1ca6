from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0021_temporary")]

    operations = [
        migrations.DeleteModel("Temporary"),
    ]
