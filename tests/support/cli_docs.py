"""The text of docs/cli.md: every command's help, as ``--help`` prints it at 100 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click

INTRODUCTION = """\
# Command line

Written by `make docs` from the commands' own help.
"""


def _sections(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    settings = {**command.context_settings, "terminal_width": 100, "max_content_width": 100}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from _sections(found, child, context)


def render(command: click.Command) -> str:
    """Markdown: one section for the command and each of its subcommands."""
    return "\n".join([INTRODUCTION, *_sections(command, "qtool", None)])


if __name__ == "__main__":
    from qtool.cli import main

    print(render(main), end="")
