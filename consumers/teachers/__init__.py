"""How likely a group's tokens are under another model, asked off the polling thread."""
