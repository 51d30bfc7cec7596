"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("nearkin", deadline=None, derandomize=True)  # no test is timed
settings.load_profile("nearkin")
