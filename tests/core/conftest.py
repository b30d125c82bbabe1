"""One bounded, repeatable profile for every generated test here."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=150,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("long", parent=settings.get_profile("core"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "core"))
