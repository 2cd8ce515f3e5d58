"""What a cache will hold: layouts of model configs, estimates, and a replay of workloads."""
