"""Sections of `bench/gpu_check.py`: each is a module with `run(setting, sink)`, run in a process of its own."""
