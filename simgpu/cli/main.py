"""The command group: what every command shares, and the list of commands, each imported only when used."""

from __future__ import annotations

import difflib
import importlib

import click

from simgpu.errors import SimError

COMMANDS = {
    "conflicts": "simgpu.cli.conflicts",
    "access": "simgpu.cli.access",
    "layout": "simgpu.cli.layout",
    "replay": "simgpu.cli.replay",
    "occupancy": "simgpu.cli.machines",
    "gpus": "simgpu.cli.machines",
    "kernels": "simgpu.cli.kernels",
}


class Refusal(click.ClickException):
    """Bad input: one line on stderr, exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Loads a command when it is used, so that occupancy does not wait for numba; turns SimError into exit code 2."""

    def list_commands(self, ctx):
        return list(COMMANDS)

    def get_command(self, ctx, name):
        if name not in COMMANDS:
            return None
        return getattr(importlib.import_module(COMMANDS[name]), name)

    def resolve_command(self, ctx, args):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(str(args[0]), COMMANDS, n=1)
            if close and "Did you mean" not in error.message:
                error.message += f" Did you mean {close[0]!r}?"
            raise

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except SimError as error:
            raise Refusal(" ".join(str(error).split())) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="simgpu")
def main():
    """Emulate a GPU kernel's memory accesses and count what Nsight Compute would count, without a GPU."""
