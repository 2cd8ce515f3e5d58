"""Compiling kernels ahead, in processes of this machine or of others."""
