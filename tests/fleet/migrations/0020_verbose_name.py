from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0019_index_name")]

    operations = [
        migrations.AlterModelOptions("photo", {"verbose_name": "picture"}),
    ]
