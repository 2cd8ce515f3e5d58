"""The CUDA kernels on a GPU: values, speed, peers, in three commands. See `__main__.py`."""
