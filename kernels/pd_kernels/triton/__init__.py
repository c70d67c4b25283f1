"""Triton kernels: written once, compiled for the GPU they run on, or interpreted on CPU tensors for tests."""
