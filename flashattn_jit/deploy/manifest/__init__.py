"""Manifests, which list kernels: their files, recording them, the library's."""
