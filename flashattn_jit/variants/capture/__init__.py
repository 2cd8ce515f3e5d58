"""What a hook captures: found by a walk over its code, read again for every call."""
