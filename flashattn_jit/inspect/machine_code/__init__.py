"""A static model of the machine code of CUDA kernels: what a loop body costs on a multiprocessor.

Nothing here runs on a GPU, and no figure of it is a measurement.
"""
