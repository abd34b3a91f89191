"""Questions about what a traced function computes."""

from collections.abc import Iterator

from jax.extend import core


def equations(jaxpr) -> Iterator:
    """Every equation, those of inner jaxprs (scan bodies and the like) once."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)
