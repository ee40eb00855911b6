"""What is to run on a cluster, and what each replica of it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, frozen

from intarsia.errors import ConfigError


def _at_least(low: float) -> Any:
    def check(_: object, attribute: Attribute[Any], value: float) -> None:
        if not low <= value < float("inf"):
            raise ConfigError(f"{attribute.name}: {value!r} is not a number from {low:g}", field=attribute.name)

    return check


@frozen(kw_only=True)
class Plan:
    """Replicas of one engine.

    Attributes:
        config: the engine's, as plain data: sections of options.
        replicas: how many.
        tp: ranks of one replica that split each layer among them. A config may give stages as well (`executor.pp`);
            all ranks of a replica run on one machine.
        cpus: cores of one rank.
        gpus: of one rank.

    Raises:
        ConfigError: a number is too small, or the config says something else of the ranks.
    """

    config: Mapping[str, Any]
    replicas: int = field(default=1, validator=_at_least(1))
    tp: int = field(default=1, validator=_at_least(1))
    cpus: float = field(default=1, validator=_at_least(0.01))
    gpus: float = field(default=0, validator=_at_least(0))

    def __attrs_post_init__(self) -> None:
        executor = self.config.get("executor", {})
        said = executor.get("tp", self.tp)
        if self.tp > 1 and (said != self.tp or executor.get("use", "auto") not in ("auto", "parallel")):
            raise ConfigError(f"tp: {self.tp}, but the config's executor is {dict(executor)}", field="tp")

    @property
    def engine_config(self) -> dict[str, Any]:
        """The config of one replica's engine, its ranks included."""
        config = {name: section for name, section in self.config.items() if name != "frontend"}
        if self.tp > 1:
            config["executor"] = {**config.get("executor", {}), "use": "parallel", "tp": self.tp}
        return config

    @property
    def ranks(self) -> int:
        """How many processes share one engine."""
        executor = self.engine_config.get("executor", {})
        return int(executor.get("tp", 1)) * int(executor.get("pp", 1))

    @property
    def resources(self) -> dict[str, float]:
        """What Ray sets aside for one replica, all of it on one machine."""
        wanted = {"CPU": self.cpus * self.ranks, "GPU": self.gpus * self.ranks}
        return {name: amount for name, amount in wanted.items() if amount}
