"""From graphs to C++ text."""
