"""Is this variant computed right: fa.verify."""
