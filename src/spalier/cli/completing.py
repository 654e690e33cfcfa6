"""`spalier completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from spalier.cli.state import State, examples


@click.command(
    epilog=examples(
        'eval "$(spalier completion bash)"     # in ~/.bashrc',
        'eval "$(spalier completion zsh)"      # in ~/.zshrc',
        "spalier completion fish > ~/.config/fish/completions/spalier.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    state: State = ctx.obj
    source = kind(ctx.find_root().command, {}, "spalier", "_SPALIER_COMPLETE").source()
    state.show(source, {"shell": shell, "script": source})
