"""A TCP proxy whose connections a test can cut, stop and let go on."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Proxy:
    """Passes bytes between whoever connects and a server.

    Attributes:
        accepting: whether new connections are passed on; otherwise they are closed at once.
        bytes_left: cut everything after so many more bytes to clients, in the middle of a message; None never.
    """

    def __init__(self, address):
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepting, self.bytes_left, self.connections = True, None, 0
        self.stopped = threading.Event()
        self._cut = threading.Event()
        self._closing = threading.Event()
        self._peers = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.set()
        self._thread.join()

    def cut(self):
        """Close every connection as it is."""
        self._cut.set()
        while self._cut.is_set():
            self._closing.wait(0.001)

    def _run(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                if self._cut.is_set():
                    self._drop_all(selector)
                    self._cut.clear()
                if self.stopped.is_set():
                    self._closing.wait(0.005)
                    continue
                for key, _ in selector.select(0.01):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj in self._peers:
                        self._pass(selector, key.fileobj)
            self._drop_all(selector)
            self._listener.close()

    def _accept(self, selector):
        client, _ = self._listener.accept()
        if not self.accepting:
            client.close()
            return
        try:
            server = socket.create_connection(self._target, timeout=1)
        except OSError:
            client.close()
            return
        self.connections += 1
        for one, other in ((client, server), (server, client)):
            self._peers[one] = (other, one is server)
            selector.register(one, selectors.EVENT_READ)

    def _pass(self, selector, source):
        target, to_client = self._peers[source]
        try:
            data = source.recv(1 << 16)
            if to_client and self.bytes_left is not None:
                data, self.bytes_left = data[: self.bytes_left], max(0, self.bytes_left - len(data))
            if data:
                target.settimeout(5)
                target.sendall(data)
            if not data or self.bytes_left == 0:
                self.bytes_left = None
                self._drop(selector, source, target)
        except OSError:
            self._drop(selector, source, target)

    def _drop(self, selector, *sockets):
        for one in sockets:
            if self._peers.pop(one, None) is not None:
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(one)
                one.close()

    def _drop_all(self, selector):
        self._drop(selector, *list(self._peers))
