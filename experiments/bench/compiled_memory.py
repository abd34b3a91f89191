"""Memory of a compiled function, as the compiler planned it."""

from __future__ import annotations

import jax


def peak_gib(compiled: jax.stages.Compiled) -> float:
    """Returns what one device holds at its peak: arguments, results (once where memory is donated), temporaries."""
    use = compiled.memory_analysis()
    held = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes - use.alias_size_in_bytes
    return held / 2**30
