"""A proxy between each role and the broker, so that every role can lose its network alone."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Self

from infra.broker.ports import free_port
from tests.chaos.schedule import EVERYONE, Action
from tests.tcp_proxy import TcpProxy


class Network:
    """Open from the start. A context manager that takes every proxy away."""

    def __init__(self, roles: Iterable[str]) -> None:
        ports = _distinct_ports()
        self._proxies = {role: TcpProxy(next(ports), next(ports)) for role in roles}

    @property
    def proxied(self) -> Mapping[int, int]:
        """For start_broker(): its listener behind each proxy, and the proxy's port."""
        ports = {proxy.server_port: proxy.port for proxy in self._proxies.values()}
        return MappingProxyType(ports)

    def servers(self, role: str) -> str:
        """The broker, as the role sees it."""
        return f"127.0.0.1:{self._proxies[role].port}"

    def lose(self, role: str, action: Action) -> None:
        for proxy in self._of(role):
            proxy.cut() if action is Action.CUT else proxy.freeze()

    def heal(self, role: str) -> None:
        for proxy in self._of(role):
            proxy.heal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies.values():
            proxy.close()

    def _of(self, role: str) -> list[TcpProxy]:
        return list(self._proxies.values()) if role == EVERYONE else [self._proxies[role]]


def _distinct_ports() -> Iterator[int]:
    """The listeners are taken only when the broker starts, so a port could be drawn twice."""
    given: set[int] = set()
    while True:
        port = free_port()
        if port not in given:
            given.add(port)
            yield port
