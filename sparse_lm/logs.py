"""What the entry points log: this library's information, other libraries' warnings only."""

import logging

from absl import logging as absl_logging


def configure() -> None:
    """Call from an entry point's `main`, once flags are parsed."""
    absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax logs tens of lines a checkpoint at INFO
    absl_logging.get_absl_handler().setFormatter(logging.Formatter("%(message)s"))
    for name in ("sparse_lm", "__main__"):  # the second is the entry point itself
        logging.getLogger(name).setLevel(logging.INFO)
