"""Records what a process ran on: device, versions, commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_ROOT = Path(__file__).parents[3]


def provenance() -> dict[str, Any]:
    """Returns, JSON-ready, "device" (kind, platform, count), "versions" by package and "git_commit"."""
    devices = jax.devices()
    return {
        "device": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "versions": {"python": platform.python_version(), **_installed(PACKAGES)},
        "git_commit": git_commit(),
    }


def git_commit(root: Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with "-dirty" if tracked files have changed since.

    None if `root` is not the top of a checkout, or git cannot tell. Nothing is written there, not even a lock, which a
    run that is killed would leave behind.
    """
    if not (root / ".git").exists():
        return None  # a directory further up may be some other project's
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changes else commit


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # such as the CUDA plugin on a machine without a GPU
    return versions
