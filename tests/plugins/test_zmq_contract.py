"""The ZeroMQ frontend keeps the contract of frontends, spoken to by its own client."""

from zmq_contract import ZmqFrontendContract


class TestZmq(ZmqFrontendContract):
    pass
