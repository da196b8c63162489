"""Measurements, as ratios against a baseline that ran in the same minutes. Never a timed test."""
