"""The command line, `flashattn-jit`: thin commands over deploy, inspect and jit."""

from __future__ import annotations


def main() -> None:
    """The entry point of `flashattn-jit` and `python -m flashattn_jit`; exits the process."""
    from .app import app

    app.main(prog_name="flashattn-jit")
