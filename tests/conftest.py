"""Settings every test shares: no wall-clock deadlines, no example database on disk, and Triton without a GPU."""

import os
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")  # before it is imported
settings.register_profile("default", deadline=None, database=None, derandomize=True)
settings.load_profile("default")
