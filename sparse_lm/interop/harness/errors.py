"""What evaluation in the harness raises; a module of its own, as it does not need the harness."""


class HarnessError(ValueError):
    """Tasks that cannot be evaluated: a missing package, an unknown task, or a request that a model cannot answer."""
