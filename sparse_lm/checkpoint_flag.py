"""The flag that chooses a run's checkpoint, for the entry points that read one."""

from __future__ import annotations

from absl import flags

flags.disclaim_key_flags()  # the flag is one of the entry point that defines it, and so in its --help


class _CheckpointParser(flags.ArgumentParser):
    syntactic_help = "latest, best or a step"

    def parse(self, argument: str) -> int | str:
        if argument.isdecimal():
            return int(argument)
        if argument not in ("latest", "best"):
            raise ValueError(f"must be {self.syntactic_help}")
        return argument


def define_checkpoint_flag() -> None:
    """Defines --checkpoint: "latest", "best" or a step, an int."""
    flags.DEFINE(_CheckpointParser(), "checkpoint", "latest", "latest, best (by held-out loss) or a step.")
