"""What users give, checked: tensors, limits, torch's own modes of calling."""
