"""What only some sites need: adapters for other packages, and apps. Nothing else imports them."""
