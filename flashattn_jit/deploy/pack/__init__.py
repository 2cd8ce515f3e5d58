"""Kernels in one file or in a wheel, and out of a file."""
