"""The one live screen of a run: what is known (facts), what to show (view), how (panel, line)."""
