"""Kernels ahead of deployment: manifests of what a service uses, warming, packing."""
