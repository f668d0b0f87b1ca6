"""What operators do, as functions; the commands and the admin translate."""
