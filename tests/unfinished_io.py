"""For tests of damage: what the libraries were still writing or reading when something else failed."""

import pytest


def leaves_io_unfinished(test):
    """A test after which that complains as it is collected: there, and not in a later test."""
    ignore = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return pytest.mark.usefixtures("collected")(ignore(test))
