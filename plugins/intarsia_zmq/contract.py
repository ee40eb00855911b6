"""What the contract of frontends is told of `zmq`: how its own client speaks to it. `plugins check zmq` runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from intarsia.protocols import Frontend
from intarsia.testing.frontends import FrontendContract, free_port
from intarsia.types import Completion, Provider, SamplingParams
from intarsia_zmq import provide_frontends
from intarsia_zmq.client import Client, OutputStream
from intarsia_zmq.control_client import ask_control
from intarsia_zmq.link import Link
from intarsia_zmq.sockets import Places


class _Silent(Link):
    """A link that ends without a word."""

    __slots__ = ()

    def _say_bye(self) -> None:
        pass


class _Vanishing(Client):
    def vanish(self) -> None:
        self._link.__class__ = _Silent
        self.close()


class ZmqClient:
    """The plugin's client, as the contract speaks."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._client = _Vanishing(address, timeout_s=timeout_s)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        # As one of a list: no tokens at all would be a list of no prompts.
        return self._client.generate([list(prompt)], params)[0]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> OutputStream:
        return self._client.stream(prompt, params)

    def close(self) -> None:
        self._client.close()

    def vanish(self) -> None:
        self._client.vanish()


def _places(frontend: Frontend) -> Places:
    """Return where it listens; frontends that stand around it are those of the suite's own tests."""
    places: Places = frontend.places  # type: ignore[attr-defined]
    return places


class ZmqContract(FrontendContract):
    """Over TCP on this machine; its control socket is in the folder that it is handed."""

    options: ClassVar[Mapping[str, Any]] = {"heartbeat_s": 1.0, "grace_s": 0.5, "log_level": "error"}
    crowded: ClassVar[Mapping[str, Any]] = {"limits": {"requests": 5}}

    def provider(self) -> Provider:
        return provide_frontends()[0]

    def places(self, folder: Path) -> Mapping[str, Any]:
        """Return options of a free port."""
        return {"bind": f"tcp://127.0.0.1:{free_port()}", "control": f"ipc://{folder}/control"}

    def connect(self, frontend: Frontend) -> ZmqClient:
        """Return a client of it."""
        return ZmqClient(_places(frontend).data.text, self.patience_s)

    def drain(self, frontend: Frontend) -> None:
        """Tell it to finish what runs, and end."""
        control = _places(frontend).control
        assert control is not None
        ask_control(control.text, "shutdown", timeout_s=self.patience_s)

    def endpoint(self, frontend: Frontend) -> tuple[str, int]:
        """Return host and port."""
        host, _, port = _places(frontend).data.text.removeprefix("tcp://").partition(":")
        return host, int(port)

    def exposed(self) -> Mapping[str, Any]:
        """Return options of a port that every machine reaches, without keys."""
        return {"bind": "tcp://0.0.0.0:*", "control": ""}
