"""The actions of operators as functions; the commands and the admin only parse and show."""
