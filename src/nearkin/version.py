"""The version, where nothing else has to be imported for it; and which formats it reads."""

from collections.abc import Sequence

__version__ = "0.1.0"


def check_format(found: object, known: Sequence[object]) -> None:
    """Refuse a file of a format that is not among those which this release reads.

    Raises:
        ValueError: With all of them.

    >>> check_format(2, (1, 2))
    """
    if found not in known:
        read = " and ".join(str(each) for each in known)
        raise ValueError(f"it is of format {found}, nearkin {__version__} reads {read}")
