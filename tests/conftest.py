"""What all tests share: in CI, property tests draw the same cases every time, so that a run can be repeated."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
