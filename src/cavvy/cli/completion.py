"""`cavvy completion`: prints the completion script for a shell."""

import click


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands, options, jobs, providers and GPUs.

    \b
    bash: cavvy completion bash > ~/.local/share/bash-completion/completions/cavvy
    zsh:  cavvy completion zsh > ~/.zfunc/_cavvy  (with fpath+=~/.zfunc before compinit)
    fish: cavvy completion fish > ~/.config/fish/completions/cavvy.fish
    """
    from click.shell_completion import get_completion_class

    from cavvy.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "cavvy", "_CAVVY_COMPLETE").source())
