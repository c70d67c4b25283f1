"""Native CPU kernels: C++ sources, their compilation, their binding, and the kernel set made of them."""
