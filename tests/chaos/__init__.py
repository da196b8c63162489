"""Processes of the real roles on a real broker, killed and stopped at random, then audited."""
