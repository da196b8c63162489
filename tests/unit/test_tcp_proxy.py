"""The proxy loses the network as a network does, and gives it back."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.tcp_proxy import HOST, TcpProxy

SOON_S = 0.2
WAIT_S = 5.0


class Echo:
    """A server that sends back what it gets, until it is stopped; start() takes the same port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        self._listener = socket.create_server((HOST, self.port))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            while chunk := connection.recv(65_536):
                connection.sendall(chunk)
        except OSError:
            return
        connection.close()


@pytest.fixture
def server() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.stop()


@pytest.fixture
def proxy(server: Echo) -> Iterator[TcpProxy]:
    with TcpProxy(server.port) as opened:
        yield opened


def connected(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection((HOST, proxy.port), timeout=WAIT_S)


def answer(client: socket.socket, sent: bytes) -> bytes:
    client.sendall(sent)
    return received(client, len(sent))


def received(client: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (chunk := client.recv(65_536)):
        found += chunk
    return found


def test_every_byte_gets_through_both_ways(proxy):
    sent = bytes(range(256)) * 20_000
    with connected(proxy) as client:
        threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
        assert received(client, len(sent)) == sent


def test_the_end_of_a_connection_gets_through(proxy):
    with connected(proxy) as client:
        assert answer(client, b"x") == b"x"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_a_cut_resets_connections_and_refuses_new_ones(proxy):
    with connected(proxy) as client:
        assert answer(client, b"x") == b"x"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)
    proxy.heal()
    with connected(proxy) as client:
        assert answer(client, b"y") == b"y"


def test_frozen_bytes_arrive_after_it_is_healed(proxy):
    with connected(proxy) as client:
        assert answer(client, b"x") == b"x"
        proxy.freeze()
        client.sendall(b"late")
        with connected(proxy) as second:  # taken, as by a network that drops what follows
            second.sendall(b"too")
            for silent in (client, second):
                silent.settimeout(SOON_S)
                with pytest.raises(TimeoutError):
                    silent.recv(1)
                silent.settimeout(WAIT_S)
            proxy.heal()
            assert received(client, 4) == b"late"
            assert received(second, 3) == b"too"


def test_what_was_frozen_can_be_cut(proxy):
    with connected(proxy) as client:
        assert answer(client, b"x") == b"x"
        proxy.freeze()
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_without_its_server_it_refuses_and_with_it_again_it_takes(server, proxy):
    server.stop()
    with connected(proxy) as first, pytest.raises(ConnectionResetError):
        first.recv(1)  # who finds out
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)
    server.start()
    for _ in range(100):
        try:
            with connected(proxy) as client:
                assert answer(client, b"back") == b"back"
            return
        except ConnectionError:
            threading.Event().wait(SOON_S)
    pytest.fail("the proxy did not notice that its server is back")


def test_it_can_be_closed_twice_and_leaves_its_port(server):
    proxy = TcpProxy(server.port)
    proxy.close()
    proxy.close()
    with TcpProxy(server.port, proxy.port) as again, connected(again) as client:
        assert answer(client, b"x") == b"x"
