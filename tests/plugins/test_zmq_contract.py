"""The ZeroMQ frontend keeps the contract of frontends, spoken to by its own client."""

from intarsia_zmq.contract import ZmqContract


class TestZmq(ZmqContract):
    pass
