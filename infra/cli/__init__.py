"""The command lines: one program a role, and `groupstream` for everything together."""
