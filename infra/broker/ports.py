"""Free TCP ports on 127.0.0.1."""

import random
import socket

from infra.broker.errors import BrokerError

# Below Linux's range for outgoing connections (32768 and up): else a client's connection can sit
# on a stopped broker's port when the broker comes back.
LOWEST, HIGHEST = 20_000, 32_000
TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:`port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java's listener does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A free port in LOWEST .. HIGHEST. Raises BrokerError when none is found."""
    random_source = random.SystemRandom()  # not the global generator: tests seed that one
    for _ in range(TRIES):
        port = random_source.randint(LOWEST, HIGHEST)
        if is_free(port):
            return port
    raise BrokerError(f"no free port among {TRIES} tried on 127.0.0.1 in {LOWEST}-{HIGHEST}")
