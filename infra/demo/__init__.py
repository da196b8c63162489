"""`groupstream demo`: the whole line on this machine, with a small model that learns."""
