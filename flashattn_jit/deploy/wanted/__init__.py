"""Which kernels calls can ask for: from variants and manifests to specs."""
