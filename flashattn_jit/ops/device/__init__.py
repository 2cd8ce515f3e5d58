"""CUDA devices and the emulator: loading kernels, memory of plans, enqueueing."""
