"""The contract of commands, as tests to inherit.

::

    from intarsia.testing.commands import CommandContract

    class TestMine(CommandContract):
        def provider(self):
            return my_plugin.provide_commands()[0]

pytest runs the inherited tests. They hold a command to what `intarsia --help` and shells rely on, and run nothing of
what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from intarsia.protocols import CommandContext
from intarsia.testing.claims import settle, unclaimed
from intarsia.types import Provider

if TYPE_CHECKING:
    import click

__all__ = ["CommandContract"]

#: A summary stands on one line of a list.
_MAX_SUMMARY = 120
_OK, _USAGE = 0, 2


class CommandContract:
    """What every command keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    Attributes:
        options: the command's own, as its provider's `options` class has them.
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def provider(self) -> Provider:
        """Return the command's provider."""
        raise NotImplementedError("provider() must return the command's provider")

    def command(self) -> click.Command:
        """Return the command, built as the command line builds it; it finds no engine and no config."""
        import click

        provider = self.provider()
        context = CommandContext(
            options=settle(provider, "commands", dict(self.options)), load_config=_no_config, compose=_no_engine
        )
        command = provider.build(context).command()
        assert isinstance(command, click.Command), f"command() returned {command!r:.200}, not a click command"
        return command

    # --- what lists show --------------------------------------------------------------------------------------------

    def test_its_summary_is_one_line(self) -> None:
        """The summary, which `intarsia --help` shows without building the command, is one line of text."""
        summary = self.provider().summary
        assert summary.strip(), "its summary is empty"
        assert "\n" not in summary, f"its summary has several lines: {summary!r:.200}"
        assert len(summary) <= _MAX_SUMMARY, f"its summary has {len(summary)} letters; {_MAX_SUMMARY} are plenty"

    def test_it_is_called_by_its_key(self) -> None:
        """The command's name is the provider's key, which is what a user types."""
        name, key = self.command().name, self.provider().key
        assert name == key, f"the command is called {name!r}, its key is {key!r}"

    # --- help -------------------------------------------------------------------------------------------------------

    def test_help_exits_0(self) -> None:
        """`--help` shows the usage and ends with 0, and neither reads a config nor composes an engine."""
        code, shown = self._run("--help")
        assert code == _OK, f"--help ends with {code}: {shown!r:.400}"
        assert "Usage:" in shown and self.provider().key in shown, f"--help shows no usage: {shown!r:.400}"

    def test_help_says_what_it_does(self) -> None:
        """The help says what the command is for."""
        command = self.command()
        assert (command.help or command.short_help or "").strip(), "the command has no help text"

    def test_every_option_is_explained(self) -> None:
        """Every option has a help text, those of subcommands too."""
        import click

        silent = [
            f"{path} {option.opts[0]}"
            for path, command in _commands(self.command())
            for option in command.params
            if isinstance(option, click.Option) and not option.hidden and not (option.help or "").strip()
        ]
        assert not silent, f"options without a help text: {', '.join(silent)}"

    # --- what is wrong ----------------------------------------------------------------------------------------------

    def test_an_unknown_option_exits_2(self) -> None:
        """An option that it does not know ends it with 2 and a message that names the option, before any work."""
        import click

        command = self.command()
        if command.context_settings.get("ignore_unknown_options") or getattr(command, "ignore_unknown_options", False):
            unclaimed("it passes unknown options on")
        unknown = "--no-such-option-at-all"
        try:
            with command.make_context(self.provider().key, [unknown]):
                pass
        except click.UsageError as error:
            assert error.exit_code == _USAGE, f"an unknown option ends it with {error.exit_code}"
            assert unknown in error.format_message(), f"the message names no option: {error.format_message()!r}"
            return
        raise AssertionError(f"it takes the option {unknown}")

    def _run(self, *args: str) -> tuple[int, str]:
        """Run the command in this process; return its exit code, and what it wrote."""
        from click.testing import CliRunner

        result = CliRunner().invoke(self.command(), list(args), prog_name=self.provider().key)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output


def _commands(command: click.Command, path: str = "") -> list[tuple[str, click.Command]]:
    """Return a command and its subcommands, by path."""
    import click

    path = f"{path} {command.name}".strip()
    found = [(path, command)]
    if isinstance(command, click.Group):
        for each in command.commands.values():
            found += _commands(each, path)
    return found


def _no_config(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it reads a config before it has anything to do")


def _no_engine(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it composes an engine before it has anything to do")
