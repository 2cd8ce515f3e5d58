"""The PTX emulator from Python."""
