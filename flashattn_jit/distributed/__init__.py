"""Attention over the ranks of a process group of torch.distributed."""
