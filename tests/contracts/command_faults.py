"""Commands that are broken on purpose, each filed under the claim of the contract that finds it."""

import click
from attrs import evolve

from contracts.planted import planting
from intarsia.testing.commands import CommandContract
from intarsia.types import Provider

FAULTS = []
fault = planting(FAULTS)


class Good:
    """A command as it should be."""

    def __init__(self, context):
        self.context = context

    def command(self):
        @click.command("good")
        @click.option("--times", type=int, default=1, help="How often.")
        def good(times):
            """Say how it is."""
            click.echo("good " * times)

        return good


GOOD = Provider(key="good", summary="Say how it is.", build=Good)


def contract(part):
    """Return the contract for a broken command."""

    class Broken(CommandContract):
        def provider(self):
            return evolve(GOOD, build=part, **dict(getattr(part, "facts", ())))

    return Broken


@fault("test_its_summary_is_one_line")
class Wordy(Good):
    """Its summary is a paragraph."""

    facts = (("summary", "Say how it is.\n\nThat is, say how things are."),)


@fault("test_its_summary_is_one_line")
class Silent(Good):
    """It has no summary."""

    facts = (("summary", " "),)


@fault("test_it_is_called_by_its_key")
class Renamed(Good):
    """Its key is not the name of the command."""

    facts = (("key", "better"),)


@fault("test_help_exits_0")
class Eager(Good):
    """It composes an engine before it knows what it is asked for."""

    def command(self):
        command = super().command()
        parse = command.parse_args

        def parse_args(ctx, args):
            self.context.compose(self.context.load_config(None, ()))
            return parse(ctx, args)

        command.parse_args = parse_args
        return command


@fault("test_help_exits_0")
class Unhelpful(Good):
    """It takes --help for an option that it does not know."""

    def command(self):
        return click.Command("good", callback=lambda: None, help="Say how it is.", add_help_option=False)


@fault("test_help_says_what_it_does")
class Mute(Good):
    """It has no help text."""

    def command(self):
        return click.Command("good", callback=lambda: None)


@fault("test_every_option_is_explained")
class Cryptic(Good):
    """An option of a subcommand says nothing."""

    def command(self):
        group = click.Group("good", help="Say how it is.")
        group.add_command(click.Command("more", params=[click.Option(["--loud"], is_flag=True)], help="Say more."))
        return group


@fault("test_an_unknown_option_exits_2")
class Generous(Good):
    """It takes an option that it does not know for an argument."""

    def command(self):
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        command = click.Command("good", params=[words], callback=lambda words: None, help="Say how it is.")
        command.make_parser = _taking_all(command.make_parser)
        return command


@fault("test_an_unknown_option_exits_2")
class Vague(Good):
    """It refuses an option that it does not know, and does not say which."""

    def command(self):
        command = super().command()

        def parse_args(ctx, args):
            raise click.UsageError("something is wrong", ctx)

        command.parse_args = parse_args
        return command


def _taking_all(make):
    def make_parser(ctx):
        parser = make(ctx)
        parser.ignore_unknown_options = True
        return parser

    return make_parser
