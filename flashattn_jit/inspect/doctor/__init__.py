"""`doctor`: what on this machine would keep kernels from being compiled, kept, found or run."""
