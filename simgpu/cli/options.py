"""Options several commands share, and printing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simgpu.report import FORMATS, render

format_option = click.option(
    "--format", "fmt", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print the result."
)
gpu_option = click.option("--gpu", default="h20", show_default=True, metavar="NAME", help="A GPU of `simgpu gpus`.")


class Integer(click.ParamType):
    """An integer in decimal, hexadecimal (0x) or binary (0b)."""

    name = "integer"

    def convert(self, value, param, ctx):
        if isinstance(value, int):
            return value
        try:
            return int(value, 0)
        except ValueError:
            self.fail(f"{value!r} is not an integer", param, ctx)


def emit(fmt: str, *args, **kwargs) -> None:
    """Print what :func:`simgpu.report.render` makes, in colour on a terminal."""
    click.echo(render(fmt, *args, console=Console(), **kwargs), nl=False)


@contextmanager
def progress(what: str) -> Iterator:
    """A ``callback(done, total)`` that moves a bar on a terminal, and None where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
