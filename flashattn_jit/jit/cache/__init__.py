"""Where compiled kernels are found: folders, packs, remote layers; what an entry is."""
