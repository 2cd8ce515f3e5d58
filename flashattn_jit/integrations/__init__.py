"""Ways into the engine from other libraries; each module imports one library."""
