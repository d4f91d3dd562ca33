"""The command group: what every command shares, and the list of commands, each imported only when used."""

from __future__ import annotations

import difflib
import errno
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import click

from simgpu.errors import SimError

COMMANDS = {
    "conflicts": "simgpu.cli.conflicts",
    "report": "simgpu.cli.report",
    "access": "simgpu.cli.access",
    "layout": "simgpu.cli.layout",
    "replay": "simgpu.cli.replay",
    "occupancy": "simgpu.cli.machines",
    "gpus": "simgpu.cli.machines",
    "check": "simgpu.cli.check",
    "liveness": "simgpu.cli.liveness",
    "validate": "simgpu.cli.validate",
    "claims": "simgpu.cli.claims",
    "compare": "simgpu.cli.compare",
    "diff": "simgpu.cli.diff",
    "search": "simgpu.cli.search",
    "kernels": "simgpu.cli.kernels",
}


class Refusal(click.ClickException):
    """Bad input: one line on stderr, exit code 2."""

    exit_code = 2


@contextmanager
def one_line() -> Iterator[None]:
    """Turn a mistake in the input, or in how the command was called, into a :class:`Refusal`."""
    try:
        yield
    except SimError as error:
        raise Refusal(_line(str(error))) from error
    except click.UsageError as error:
        if error.ctx is None or type(error).__name__ == "NoArgsIsHelpError":  # `simgpu` alone prints the help
            raise
        raise Refusal(f"{_line(error.format_message())} (see {error.ctx.command_path} --help)") from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # click ends quietly when `| head` has seen enough
            raise
        raise click.ClickException(f"cannot write the output: {error.strerror or error}") from error


def _line(message: str) -> str:
    return " ".join(message.split())


class Commands(click.Group):
    """Loads a command when it is used, so that occupancy does not wait for numba; refuses bad input in one line."""

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

    def make_context(self, *args, **kwargs):
        with one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx):
        with one_line():
            return super().invoke(ctx)


@click.group("simgpu", cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="simgpu", prog_name="simgpu")
def main():
    """Emulate a GPU kernel's memory accesses and count what Nsight Compute would count, without a GPU.

    \b
    Examples:
    simgpu conflicts transpose@pad1
    simgpu access "lane * 128" --op lds --width 4
    simgpu occupancy --gpu h20 --threads 256 --regs 72 --smem 69632

    Bad input is refused in one line, with exit code 2.
    """
