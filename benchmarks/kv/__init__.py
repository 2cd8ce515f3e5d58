"""What lies in a KV cache: `python -m benchmarks.kv` for `fa.kv`, and commands for each storage."""
