"""From a variant's IR to one rendered source: targets, kernel specs, rendering."""
