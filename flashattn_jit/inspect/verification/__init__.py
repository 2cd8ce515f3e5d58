"""Is this variant computed right: `Variant.verify`."""
