"""The same bits each time a program runs on the same device: `config.deterministic`.

On a CPU, XLA's programs are so anyway. On a GPU some add with atomics, in the order in which threads come,
and kernels are chosen by timing them, unless XLA is told otherwise before it starts.
"""

from __future__ import annotations

import os

from sparse_lm.config import Config, ConfigError

FLAG = "--xla_gpu_deterministic_ops=true"


def request_determinism() -> None:
    """Tells XLA, through the environment. JAX must not have started yet: importing it is not starting it."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()


def check_determinism(config: Config) -> None:
    """Raises ConfigError if the run asks for determinism and nobody has told XLA."""
    if config.deterministic and FLAG not in os.environ.get("XLA_FLAGS", "").split():
        needs = f"needs {FLAG} in XLA_FLAGS before JAX starts; python -m sparse_lm.train sees to it"
        raise ConfigError("deterministic", True, needs)
