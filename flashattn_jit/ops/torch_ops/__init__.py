"""A call as one torch op, for modes, tracers and graphs."""
