"""The command line in the test's own process."""

from types_checked import unchecked


@unchecked()
def run(*arguments: object) -> int:
    """Call `nearkin` with these arguments and return the exit code."""
    from nearkin.cli import main  # here, so that conftest.py imports nothing before it is checked

    return main([str(argument) for argument in arguments])
