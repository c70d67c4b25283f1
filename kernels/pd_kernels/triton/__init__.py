"""Triton kernels for GPUs; under TRITON_INTERPRET=1 they also run on CPU tensors."""
