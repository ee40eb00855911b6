"""Who may listen where, and who may connect."""

import logging
import shutil
import socket
import time

import pytest

from intarsia.errors import ConfigError
from intarsia_zmq.frontend import places_of
from intarsia_zmq.keys import read_key_pair, write_keys
from intarsia_zmq.options import ZmqOptions
from intarsia_zmq.security import ClientKeys, read_address
from serving import Peer, eventually, serving


def curve(keys, server, name):
    """Return the socket options of a client with this key."""
    pair = read_key_pair(keys / f"{name}.key_secret")
    return {
        "curve_serverkey": read_key_pair(keys / f"{server}.key_secret").public,
        "curve_publickey": pair.public,
        "curve_secretkey": pair.secret,
    }


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    for name in ("server", "alice", "bob", "mallory"):
        write_keys(folder, name)
    (tmp_path / "allowed").mkdir()
    for name in ("alice", "bob"):
        shutil.copy(folder / f"{name}.key", tmp_path / "allowed")
    return folder


def secured(tmp_path, **more):
    return {
        "bind": "tcp://127.0.0.1:*",
        "server_key": str(tmp_path / "keys" / "server.key_secret"),
        "client_keys": str(tmp_path / "allowed"),
    } | more


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.1.2.3:*", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:5555", True),
        ("ipc://x.sock", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://[::ffff:10.0.0.1]:5555", False),
        ("tcp://10.0.0.1:5555", False),
        ("tcp://eth0:5555", False),
        ("tcp://localhost.evil.example:5555", False),
    ],
)
def test_only_loopback_and_ipc_are_local(text, local):
    assert read_address(text, "frontend.bind").local is local


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5555",
        "udp://127.0.0.1:1",
        "inproc://x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "ipc://",
        "ipc://@a",
        "ipc://*",
        "tcp://::1:5",
        "tcp://10.0.0.1;127.0.0.1:5",
        "ws://127.0.0.1:1",
    ],
)
def test_what_is_no_address_is_refused_by_its_option(text):
    with pytest.raises(ConfigError) as caught:
        read_address(text, "frontend.bind")
    assert caught.value.field == "frontend.bind"


@pytest.mark.parametrize("option", ["bind", "events"])
def test_listening_to_others_needs_keys_or_the_word_insecure(option, keys, tmp_path):
    exposed = {option: "tcp://0.0.0.0:5557"}
    with pytest.raises(ConfigError, match=r"keygen.*insecure = true"):
        places_of(ZmqOptions(**exposed))
    places_of(ZmqOptions(**exposed, insecure=True))
    places_of(ZmqOptions(**(secured(tmp_path) | exposed)))


def test_keys_that_are_missing_open_to_others_or_no_keys_are_refused_without_showing_them(keys, tmp_path):
    secret = keys / "server.key_secret"
    text = read_key_pair(secret).secret.decode()
    for options, said in (
        ({"client_keys": ""}, "client_keys"),
        ({"server_key": ""}, "server_key"),
        ({"client_keys": str(tmp_path / "nowhere")}, "not a folder"),
        ({"server_key": str(tmp_path / "nothing")}, "No such file"),
        ({"server_key": str(keys / "server.key")}, "can read|no secret key"),
    ):
        with pytest.raises(ConfigError, match=said):
            places_of(ZmqOptions(**secured(tmp_path, **options)))
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        places_of(ZmqOptions(**secured(tmp_path)))
    assert text not in str(caught.value)
    secret.chmod(0o600)
    assert text not in repr(places_of(ZmqOptions(**secured(tmp_path))))


def test_a_client_with_an_allowed_key_is_served_and_all_others_are_refused_and_logged_once(keys, tmp_path, caplog):
    with serving(tmp_path, **secured(tmp_path)) as running:
        with Peer(running.address, hello=True, **curve(keys, "server", "alice")) as alice:
            alice.generate("long", max_tokens=5)
            strangers = [
                Peer(running.address, **curve(keys, "server", "mallory")),
                Peer(running.address),
                Peer(
                    running.address,
                    **(
                        curve(keys, "server", "alice")
                        | {"curve_serverkey": read_key_pair(keys / "bob.key_secret").public}
                    ),
                ),
            ]
            assert all(stranger.is_refused() for stranger in strangers)
            host, port = running.address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(1.0)  # they try again and again
            assert all(stranger.quiet(0.05) for stranger in strangers)
            assert alice.until_end("long")[1] == [0, 1, 2, 3, 4]
            for stranger in strangers:
                stranger.close()
        refused = read_key_pair(keys / "mallory.key_secret").public.decode()
        assert sum(refused in record.getMessage() for record in caplog.records) == 1
        assert sum("ZeroMQ as this socket" in record.getMessage() for record in caplog.records) == 1
        secrets = [read_key_pair(keys / f"{name}.key_secret").secret.decode() for name in ("server", "alice")]
        assert not any(secret in record.getMessage() for record in caplog.records for secret in secrets)


def test_a_revoked_key_loses_its_session_and_a_new_one_is_let_in(keys, tmp_path, caplog):
    with serving(tmp_path, **secured(tmp_path)) as running:
        alice = Peer(running.address, hello=True, **curve(keys, "server", "alice"))
        bob = Peer(running.address, hello=True, **curve(keys, "server", "bob"))
        alice.generate("a", max_tokens=10**6)
        alice.next()
        (tmp_path / "allowed" / "alice.key").unlink()
        eventually(lambda: running.control("status").body["sessions"] == 1)
        eventually(lambda: not running.engine.has_work)
        while not alice.quiet(0.2):
            alice.next()
        assert alice.is_refused()
        with Peer(running.address, **curve(keys, "server", "alice")) as again:
            assert again.is_refused()
            time.sleep(1.0)  # both try again and again
        revoked = read_key_pair(keys / "alice.key_secret").public.decode()
        assert sum(revoked in record.getMessage() for record in caplog.records) == 1
        assert bob.ask("ping").kind == "pong"
        shutil.copy(keys / "mallory.key", tmp_path / "allowed")
        running.control("reload")
        with Peer(running.address, hello=True, **curve(keys, "server", "mallory")) as mallory:
            assert mallory.welcome.kind == "welcome"
        alice.close()
        bob.close()


def test_a_token_of_one_key_is_nothing_to_another(keys, tmp_path):
    with serving(tmp_path, **secured(tmp_path)) as running:
        alice = Peer(running.address, hello=True, **curve(keys, "server", "alice"))
        alice.generate("a", max_tokens=10**6)
        with Peer(running.address, **curve(keys, "server", "bob")) as bob:
            welcome = bob.hello(token=alice.welcome.body["token"], received={})
            assert not welcome.body["resumed"] and welcome.body["requests"] == []
            bob.send("cancel", "a")
            time.sleep(0.1)
            assert running.control("status").body["in_flight"] == 1
        alice.close()


def test_the_folder_of_keys_is_reread_and_files_that_are_no_keys_are_skipped(keys, tmp_path, caplog):
    now = [0.0]
    known = ClientKeys(tmp_path / "allowed", lambda: now[0])
    alice, mallory = (read_key_pair(keys / f"{name}.key_secret").public for name in ("alice", "mallory"))
    assert alice in known and mallory not in known
    (tmp_path / "allowed" / "garbage.key").write_bytes(b"\xff" * 100_000)
    (tmp_path / "allowed" / "empty.key").write_text("")
    (tmp_path / "allowed" / "sub").mkdir()
    shutil.copy(keys / "mallory.key_secret", tmp_path / "allowed")
    shutil.copy(keys / "mallory.key", tmp_path / "allowed" / "m.key")
    assert mallory not in known  # it was looked at a moment ago
    now[0] = 1.0
    with caplog.at_level(logging.WARNING, "intarsia.zmq"):
        assert mallory in known and len(known) == 3
    assert sum("skipped" in record.getMessage() for record in caplog.records) == 2
    now[0] = 2.0
    shutil.rmtree(tmp_path / "allowed")
    assert alice not in known and len(known) == 0


def test_a_file_or_another_servers_socket_is_never_taken(tmp_path):
    (tmp_path / "data").write_text("precious")
    with pytest.raises(ConfigError, match="no socket"), serving(tmp_path):
        pass
    assert (tmp_path / "data").read_text() == "precious"
    (tmp_path / "data").unlink()
    with serving(tmp_path) as running:
        with pytest.raises(ConfigError, match="another server"), serving(tmp_path):
            pass
        with Peer(running.address, hello=True) as peer:
            assert peer.ask("ping").kind == "pong"


def test_a_socket_left_behind_is_replaced(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "data"))
    left.close()
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        assert peer.welcome.kind == "welcome"


def test_a_port_in_use_is_named(tmp_path):
    with (
        serving(tmp_path, bind="tcp://127.0.0.1:*") as running,
        pytest.raises(ConfigError, match=r"frontend\.bind.*in use"),
        serving(tmp_path, bind=running.address, control=""),
    ):
        pass
