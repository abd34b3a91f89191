"""Names for shape annotations, such as `Float[Array, "T D"]`: T tokens, D model width, F neurons, S of them kept.

Annotations are strings, for readers and for the tests, which check them: ops work without jaxtyping.
"""

from __future__ import annotations

try:
    from jaxtyping import Bool, Float, Int32, Shaped
except ImportError:
    Bool = Float = Int32 = Shaped = None

__all__ = ["Bool", "Float", "Int32", "Shaped"]
