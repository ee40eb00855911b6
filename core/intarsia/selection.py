"""Choosing the part of a slot among those that plugins offer, with the reason, and building it.

Nothing falls back silently: each choice is recorded. Plugins' code is called here, so whatever it raises that is no
error of intarsia's becomes one that names the plugin, its distribution and its version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import attrs
from attrs import Factory, define, evolve, field, frozen

from intarsia.config import structure
from intarsia.errors import CompositionError, ConfigError, IntarsiaError, PluginError, did_you_mean
from intarsia.hookspecs import KINDS, kind_of
from intarsia.plugins import Offer, Registry
from intarsia.protocols import Context, PartContext, Selection
from intarsia.saying import is_fault, said
from intarsia.structuring import shown
from intarsia.types import AUTO, NONE, Choice, Fit, ModelChoice, Provider, Unfit

#: Makes the context of a kind of part, given (by keyword) the `options` of the one that is tried.
ContextOf = Callable[..., Context]

_ORDER = tuple(kind.slot for kind in KINDS)
#: Built by the executor around loaded weights, so no other part can be handed one.
_BUILT_LATER = ("runner",)


class UnfitError(CompositionError):
    """No part of a slot can serve the context, or not the one that the config names."""


def config_path(slot: str) -> str:
    """Return where a slot's choice stands in a config."""
    return f"model.{slot}" if slot in ("loader", "family") else slot


def _options_path(path: str) -> str:
    """Return where the options of the part at this path stand: those of a loader beside the model's own keys."""
    return "model" if path == config_path("loader") else path


def titled(offer: Offer) -> str:
    """Return a part's plugin, slot and key, for messages."""
    return f"{offer.plugin}: {offer.kind.slot} {offer.provider.key!r}"


@contextmanager
def blamed(doing: str, *offers: Offer) -> Iterator[None]:
    """Turn what a part's code raises into a PluginError that names it; errors of intarsia's own pass as they are."""
    try:
        yield
    except IntarsiaError:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        who = " or ".join(map(titled, offers))
        raise PluginError(f"{who} failed in {doing}: {said(error)}") from error


@frozen
class Chosen:
    """A part that was chosen, not yet built.

    Attributes:
        offer: the provider, and whose it is.
        options: an instance of its options class.
        parts: slot -> part, for the slots that it requires.
        asked_by: `config` or `auto`.
        reason: why it was chosen.
    """

    offer: Offer
    options: Any
    parts: Mapping[str, Any]
    asked_by: str
    reason: str

    @property
    def slot(self) -> str:
        """The slot that it is for."""
        return self.offer.kind.slot

    @property
    def key(self) -> str:
        """What a config calls it."""
        return self.offer.provider.key

    def build(self, context_of: ContextOf) -> Any:
        """Make the part.

        Raises:
            PluginError: its code fails, or what it returns is not such a part; names the plugin.
            IntarsiaError: whatever else the part says is wrong.
        """
        context = _context(context_of, self.options, self.parts)
        with blamed("build", self.offer):
            part = self.offer.provider.build(context)
        protocol = self.offer.kind.part
        missing = [name for name in vars(protocol) if not name.startswith("_") and not _has(part, name)]
        if missing:
            raise PluginError(
                f"{titled(self.offer)}: build returned {shown(part)}, which is no {protocol.__name__}: it lacks "
                f"{', '.join(missing)}"
            )
        return part

    def selection(self) -> Selection:
        """Return the record of this choice."""
        plugin = self.offer.plugin
        return Selection(
            slot=self.slot,
            provider=self.offer.provider,
            plugin=plugin.name,
            distribution=plugin.distribution,
            version=plugin.version,
            asked_by=self.asked_by,
            reason=self.reason,
            options=self.options,
        )


def _has(part: object, name: str) -> bool:
    # By its class first: asking the part itself would run a property.
    return hasattr(type(part), name) or hasattr(part, name)


def _context(context_of: ContextOf, options: Any, parts: Mapping[str, Any]) -> Context:
    context = context_of(options=options)
    return evolve(context, parts=parts) if isinstance(context, PartContext) else context


class _Required(dict[str, Any]):
    """The parts that one part requires. Asking for another says how to get it."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, slot: str) -> Any:
        raise PluginError(f"{self._owner}: context.parts has no {slot!r}; its provider must say requires=({slot!r},)")


@frozen
class _Candidate:
    """A part that may be chosen, and what it, or its options class, says of that."""

    offer: Offer
    fit: Fit | Unfit | ConfigError
    options: Any = None
    parts: Mapping[str, Any] = Factory(dict)

    @property
    def key(self) -> str:
        return self.offer.provider.key

    @property
    def rank(self) -> int:
        assert isinstance(self.fit, Fit)
        return self.fit.rank

    @property
    def refusal(self) -> str:
        assert not isinstance(self.fit, Fit)
        return f"{self.key}: {self.fit.reason if isinstance(self.fit, Unfit) else self.fit}"

    def chosen(self, asked_by: str, reason: str) -> Chosen:
        return Chosen(self.offer, self.options, self.parts, asked_by, reason)


@define
class Selector:
    """Fills slots in the order of `KINDS`, remembering what was chosen and built."""

    registry: Registry
    chosen: list[Chosen] = field(factory=list, init=False)
    _built: dict[str, Any] = field(factory=dict, init=False)

    def one(self, slot: str, choice: Choice, context_of: ContextOf, path: str = "", because: str = "") -> Any:
        """Choose, record and build the part of a slot; None where an optional slot stays empty.

        Args:
            slot: the slot.
            choice: what the config says of it.
            context_of: makes the context.
            path: where the choice stands in the config; the slot's own place if empty.
            because: why composition, and not the config, asks for this key.

        Raises:
            IntarsiaError: as `choose` and `Chosen.build` do.
        """
        if kind_of(slot).optional and choice.use in (AUTO, NONE):
            return None
        return self.build(self.choose(slot, choice, context_of, path, because), context_of)

    def many(self, slot: str, choices: Sequence[Choice], context_of: ContextOf) -> tuple[Any, ...]:
        """Choose, record and build the parts of a slot that holds an ordered list."""
        paths = [f"{slot}[{index}]" if len(choices) > 1 else slot for index in range(len(choices))]
        parts = [self.one(slot, choice, context_of, path) for choice, path in zip(choices, paths, strict=True)]
        self._built[slot] = tuple(part for part in parts if part is not None)
        return self._built[slot]  # type: ignore[no-any-return]

    def choose(self, slot: str, choice: Choice, context_of: ContextOf, path: str = "", because: str = "") -> Chosen:
        """Choose the part of a slot, and record why; arguments and errors are those of `pick`."""
        chosen = self.pick(slot, choice, context_of, path, because)
        self.chosen.append(chosen)
        return chosen

    def pick(self, slot: str, choice: Choice, context_of: ContextOf, path: str = "", because: str = "") -> Chosen:
        """Return the part of a slot that fits a choice best, with the reason; `one` describes the arguments.

        Raises:
            ConfigError: there is no such part, or its options are wrong.
            UnfitError: the part cannot serve the context, or none can; names those that can.
            CompositionError: several fit equally well.
            PluginError: a part breaks the contract; names its plugin.
        """
        path = path or config_path(slot)
        if choice.use == AUTO:
            candidates = [self._try(offer, choice, path, context_of) for offer in self._offers(slot)]
            return _best(candidates, choice, path, self.registry.left_out)
        named = self._try(self.registry.find(slot, choice.use), choice, path, context_of)
        if isinstance(named.fit, ConfigError):
            raise named.fit
        if isinstance(named.fit, Unfit):
            others = ", ".join(c.key for c in self._fitting(slot, path, context_of)) or "nothing that is installed"
            raise UnfitError(
                f"{path}: {choice.use!r} cannot be used here: {named.fit.reason}. What fits: {others}.", field=path
            )
        return named.chosen(AUTO if because else "config", because or named.fit.reason)

    def build(self, chosen: Chosen, context_of: ContextOf) -> Any:
        """Build what was chosen, for parts after it to require; raises as `Chosen.build` does."""
        part = self._built[chosen.slot] = chosen.build(context_of)
        return part

    def of(self, slot: str) -> list[Chosen]:
        """Return what was chosen for a slot, in order."""
        return [chosen for chosen in self.chosen if chosen.slot == slot]

    @property
    def built(self) -> dict[str, Any]:
        """Slot -> part of those that were built; a tuple where a slot holds several."""
        return dict(self._built)

    @classmethod
    def around(cls, registry: Registry, selections: Sequence[Selection], built: Mapping[str, Any]) -> Self:
        """Return a selector that knows parts which were chosen and built before."""
        made = cls(registry)
        made.chosen = [
            Chosen(registry.find(one.slot, one.provider.key), one.options, {}, one.asked_by, one.reason)
            for one in selections
        ]
        made._built = dict(built)
        return made

    def forget(self, *slots: str) -> None:
        """Empty slots again, to fill them another way."""
        self.chosen = [chosen for chosen in self.chosen if chosen.slot not in slots]
        for slot in slots:
            self._built.pop(slot, None)

    def note(self, chosen: Chosen, remark: str) -> None:
        """Add to the recorded reason of a choice."""
        reason = f"{chosen.reason}; {remark}" if chosen.reason else remark
        self.chosen = [evolve(each, reason=reason) if each is chosen else each for each in self.chosen]

    def alternatives(self, slot: str, context_of: ContextOf, accept: Callable[[Any], bool]) -> list[str]:
        """Return keys of other parts that would do, for the message of a composition that fails.

        Builds those that fit, which costs nothing that matters any more; one that fails would not do.
        """
        taken = {chosen.key for chosen in self.of(slot)}
        keys = []
        for candidate in self._fitting(slot, config_path(slot), context_of):
            with suppress(Exception):
                if candidate.key not in taken and accept(candidate.chosen(AUTO, "").build(context_of)):
                    keys.append(candidate.key)
        return keys

    def _offers(self, slot: str) -> list[Offer]:
        return list(self.registry.offers(slot).values())

    def _fitting(self, slot: str, path: str, context_of: ContextOf) -> list[_Candidate]:
        """Parts that would fit with their default options; a broken one does not."""
        fitting = []
        for offer in self._offers(slot):
            with suppress(IntarsiaError):
                candidate = self._try(offer, Choice(), path, context_of)
                if isinstance(candidate.fit, Fit):
                    fitting.append(candidate)
        return sorted(fitting, key=lambda candidate: candidate.key)

    def _try(self, offer: Offer, choice: Choice, path: str, context_of: ContextOf) -> _Candidate:
        """Ask one part whether it takes these options and fits."""
        provider = offer.provider
        required = self._required(offer)
        try:
            with blamed("its options", offer):
                options: Any = structure(provider.options, choice.options, _options_path(path), owner=provider.key)
        except ConfigError as error:
            return _Candidate(offer, error)
        if choice.use == AUTO and (named := self._named(provider)):
            return _Candidate(offer, Unfit(f"it brings its own {named.slot}, and {named.key!r} is asked for"))
        if isinstance(required, Unfit):
            return _Candidate(offer, required)
        context = _context(context_of, options, required)
        if offer.kind.slot == "runner" and (lacking := _lacking(provider, context)):
            return _Candidate(offer, Unfit(f"ranks share the model, and it has no {', '.join(lacking)}"))
        with blamed("fit", offer):
            fit = provider.fit(context)
        # Its author may not use a type checker.
        if not isinstance(fit, Fit | Unfit):
            raise PluginError(f"{titled(offer)}: fit returned {shown(fit)}, not a Fit or an Unfit")
        if isinstance(fit, Fit) and type(fit.rank) is not int:
            raise PluginError(f"{titled(offer)}: fit returned the rank {shown(fit.rank)}, not a whole number")
        return _Candidate(offer, fit, options, required)

    def asked(self, slot: str, choice: Choice) -> tuple[Offer, Any]:
        """Return who offers the part that a config names, and its options; raises as `choose` does for both."""
        offer = self.registry.find(slot, choice.use)
        with blamed("its options", offer):
            return offer, structure(offer.provider.options, choice.options, config_path(slot), owner=choice.use)

    def _named(self, provider: Provider) -> Chosen | None:
        """Return a part that the config names in a slot whose part this provider brings."""
        named = (chosen for slot in provider.provides for chosen in self.of(slot) if chosen.asked_by == "config")
        return next(named, None)

    def _required(self, offer: Offer) -> dict[str, Any] | Unfit:
        """Return the parts that one part requires.

        Raises:
            PluginError: it requires a slot whose part is never there before it.
        """
        slot = offer.kind.slot
        takes_parts = issubclass(offer.kind.context, PartContext)
        before = [s for s in _ORDER[: _ORDER.index(slot)] if s not in _BUILT_LATER] if takes_parts else []
        parts = _Required(titled(offer))
        for wanted in offer.provider.requires:
            if wanted not in before:
                raise PluginError(
                    f"{titled(offer)} requires {wanted!r}, which is not there before a {slot} is built; "
                    f"it can require: {', '.join(before) or 'nothing'}"
                )
            part = self._built.get(wanted)
            if part is None or (isinstance(part, tuple) and not part):
                known = ", ".join(self.registry.offers(wanted)) or "none"
                return Unfit(f"it requires a part for {wanted!r}, which is left empty (installed: {known})")
            parts[wanted] = part
        return parts


def _lacking(provider: Provider, context: Context) -> list[str]:
    """Return what a runner would have to do between ranks and cannot."""
    partition = context.partition if isinstance(context, PartContext) else None
    return [] if partition is None else sorted(partition.needs - provider.parallel)


def _best(candidates: Sequence[_Candidate], choice: Choice, path: str, left_out: Sequence[str]) -> Chosen:
    """Choose the candidate of the highest rank, and say over which."""
    fitting = sorted((c for c in candidates if isinstance(c.fit, Fit)), key=lambda c: c.rank, reverse=True)
    refused = [c for c in candidates if not isinstance(c.fit, Fit)]
    if not fitting:
        _raise_wrong_options(refused, choice, path)
        refusals = "; ".join(c.refusal for c in refused) or "No plugin offers one"
        out = f" Plugins left out by plugins.allow or .block: {', '.join(left_out)}." if left_out else ""
        raise UnfitError(f"{path}: nothing that is there fits. {refusals}.{out}", field=path)
    best, *others = fitting
    tied = [best, *(c for c in others if c.rank == best.rank)]
    if len(tied) > 1:
        names = " and ".join(f"{c.key!r} of {c.offer.plugin}" for c in tied)
        raise CompositionError(
            f"{path}: {names} fit equally well, with rank {best.rank}; name one of them, such as {path} = {best.key!r}",
            field=path,
        )
    assert isinstance(best.fit, Fit)
    reason = best.fit.reason or f"ranks {best.rank}"
    passed = [f"{c.key} ranks {c.rank}" for c in others] + [c.refusal for c in refused]
    return best.chosen(AUTO, f"{reason}; over {', '.join(passed)}" if passed else f"{reason}; the only one")


def _raise_wrong_options(refused: Sequence[_Candidate], choice: Choice, path: str) -> None:
    """Where all were refused for their options, raise the ConfigError that says most.

    That is the one of a part that knows every option, or else one with the nearest of all parts' options.
    """
    wrong = [c for c in refused if isinstance(c.fit, ConfigError)]
    if len(wrong) < len(refused):
        return
    known = {c.key: {f.alias for f in attrs.fields(c.offer.provider.options)} for c in wrong}
    for candidate in wrong:
        if choice.options.keys() <= known[candidate.key]:
            assert isinstance(candidate.fit, ConfigError)
            raise candidate.fit
    if not wrong:
        return
    path = _options_path(path)
    everything = {option for options in known.values() for option in options}
    name = next((option for option in choice.options if option not in everything), None)
    if name is None:  # every option is some part's, and no part takes them all
        raise ConfigError(
            f"{path}: no part takes {', '.join(choice.options)} together; "
            + "; ".join(f"{key!r} takes {', '.join(sorted(options)) or 'none'}" for key, options in known.items()),
            field=path,
        )
    owners = " or ".join(map(repr, known))
    beside = {f.name for f in attrs.fields(ModelChoice)} - {"options"} if path == "model" else set()
    raise ConfigError(
        f"{path}.{name}: unknown option of {owners}.{did_you_mean(name, everything | beside)}", field=f"{path}.{name}"
    )
