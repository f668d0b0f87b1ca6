"""An app with two commands of its own."""
