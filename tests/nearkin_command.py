"""The command line in the test's own process."""

import jaxtyping

CHECKED = False
"""Whether types are checked within commands as well: `pytest --types`."""


def run(*arguments: object) -> int:
    """Call `nearkin` with these arguments and return the exit code.

    Types and shapes are not checked meanwhile: whole runs take half the time, and what they call
    is checked in tests of its own.
    """
    from nearkin.cli import main  # here, so that conftest.py imports nothing before it is checked

    disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", not CHECKED)
    try:
        return main([str(argument) for argument in arguments])
    finally:
        jaxtyping.config.update("jaxtyping_disable", disabled)
