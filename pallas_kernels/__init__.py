"""Pallas kernels for TPU and GPU; they know only jax. See README.md for what each does and its limits."""
