"""From a call or a batch to a plan: which kernels, and who computes what."""
