"""Tools that inspect variants, kernels and the cache: verify, explain, doctor, bench."""
