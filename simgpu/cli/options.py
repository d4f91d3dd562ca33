"""Options several commands share, and printing."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from simgpu.report import FORMATS, render, to_text

format_option = click.option(
    "--format", "fmt", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print the result."
)
gpu_option = click.option("--gpu", default="h20", show_default=True, metavar="NAME", help="A GPU of `simgpu gpus`.")
unmodelled_option = click.option(
    "--allow-unmodelled", is_flag=True, help="Total what is known where some accesses have no proven rule."
)


class Integer(click.ParamType):
    """An integer in decimal, hexadecimal (0x) or binary (0b)."""

    name = "integer"

    def convert(self, value, param, ctx):
        if isinstance(value, int):
            return value
        try:
            number = int(value, 0)
        except ValueError:
            self.fail(f"{reprlib.repr(value)} is not an integer", param, ctx)
        if number.bit_length() > 64:
            self.fail(f"{reprlib.repr(value)} is not an integer of 64 bits", param, ctx)
        return number


def emit(fmt: str, *args, **kwargs) -> None:
    """Print what :func:`simgpu.report.render` makes, in colour on a terminal."""
    write(render(fmt, *args, console=Console(), **kwargs))


def draw(picture) -> None:
    """Print a picture, in colour on a terminal."""
    write(to_text(picture, console=Console(), soft_wrap=True))


def write(text: str) -> None:
    """Print ``text``; what the output's encoding lacks is escaped."""
    encoding = Console().encoding
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False)


@contextmanager
def progress(what: str) -> Iterator:
    """A ``callback(done, total)`` that moves a bar on a terminal, and None where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
