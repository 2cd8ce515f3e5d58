"""The command line, `flashattn-jit`: thin commands over deploy, inspect and jit.

app          the command group: global options, errors become exit codes
exit_codes   the table of exit codes
output       tables on a terminal, plain lines in a pipe, JSON
option_words  Python's arguments in messages, as options
options      types of options and arguments, with what shells complete
variant_names  variants as they are named on a command line
"""

from __future__ import annotations


def main() -> None:
    """The entry point of `flashattn-jit` and `python -m flashattn_jit`; exits the process."""
    from .app import app

    app.main(prog_name="flashattn-jit")
