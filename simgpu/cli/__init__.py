"""The ``simgpu`` command line."""

from simgpu.cli.main import main

__all__ = ["main"]
