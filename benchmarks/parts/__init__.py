"""What the benchmarks share: measuring, peers, work, progress."""
