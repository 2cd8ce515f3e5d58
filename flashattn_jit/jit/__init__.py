"""Compiling kernels, keeping them on disk, loading them."""
