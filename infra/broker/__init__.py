"""A Kafka broker for a run: a given one, or one started on this machine."""

from infra.broker.broker import Broker
from infra.broker.errors import BrokerError, BrokerUnavailable, NotOurBroker, WaitTimedOut
from infra.broker.provision import start_broker, stop_leftover

__all__ = [
    "Broker",
    "BrokerError",
    "BrokerUnavailable",
    "NotOurBroker",
    "WaitTimedOut",
    "start_broker",
    "stop_leftover",
]
