"""Settings every test shares: no wall-clock deadlines and no example database on disk; Triton runs on this machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any test module loads
settings.register_profile("default", deadline=None, database=None, derandomize=True)
settings.load_profile("default")
