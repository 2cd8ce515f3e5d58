"""A plan on tensors: strides, addresses and values, and the launch itself."""
