"""What every test may use: the session's broker, a run id, and the Hypothesis profiles.

Profiles: `default` for every run, HYPOTHESIS_PROFILE=nightly for the long one.
"""

import os

from hypothesis import HealthCheck, settings

from tests.broker import broker, pytest_report_collectionfinish, run_id

__all__ = ["broker", "pytest_report_collectionfinish", "run_id"]

# A busy machine is no failure of ours, so no example has a deadline.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=100, **_COMMON)
settings.register_profile("nightly", max_examples=10_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
