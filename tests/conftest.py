"""Settings every test shares: no wall-clock deadlines and no example database on disk."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("default", deadline=None, database=None, derandomize=True)
settings.load_profile("default")
