"""All roles of a run on one machine, started, watched, restarted and stopped in order."""
