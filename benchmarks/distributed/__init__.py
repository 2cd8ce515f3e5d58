"""`python -m benchmarks.distributed`: one batch over several ranks."""
