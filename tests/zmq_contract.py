"""How the contract of frontends reaches the ZeroMQ frontend: by its own client, over TCP on this machine."""

from intarsia.testing.frontends import FrontendContract, free_port
from intarsia_zmq import provide_frontends
from intarsia_zmq.client import Client
from intarsia_zmq.control_client import ask_control
from intarsia_zmq.link import Link


class _Silent(Link):
    """A link that ends without a word."""

    __slots__ = ()

    def _say_bye(self):
        pass


class ZmqClient(Client):
    def generate(self, prompt, params):
        # As one of a list: no tokens at all would be a list of no prompts.
        return super().generate([list(prompt)], params)[0]

    def vanish(self):
        self._link.__class__ = _Silent
        self.close()


class ZmqFrontendContract(FrontendContract):
    options = {"heartbeat_s": 1.0, "grace_s": 0.5, "log_level": "error"}  # noqa: RUF012
    crowded = {"limits": {"requests": 5}}  # noqa: RUF012

    def provider(self):
        return provide_frontends()[0]

    def places(self, folder):
        return {"bind": f"tcp://127.0.0.1:{free_port()}", "control": f"ipc://{folder}/control"}

    def connect(self, frontend):
        return ZmqClient(frontend.places.data.text, timeout_s=self.patience_s)

    def drain(self, frontend):
        ask_control(frontend.places.control.text, "shutdown", timeout_s=self.patience_s)

    def endpoint(self, frontend):
        host, _, port = frontend.places.data.text.removeprefix("tcp://").partition(":")
        return host, int(port)

    def exposed(self):
        return {"bind": "tcp://0.0.0.0:*", "control": ""}
