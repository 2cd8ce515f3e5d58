"""Other attention engines of the CPU, one file each, and what a case is to them (`case.py`)."""
