"""Defines what evaluation in the harness raises, without importing the harness."""


class HarnessError(ValueError):
    """Tasks that cannot be evaluated: a missing package, an unknown task, or a request that a model cannot answer."""
