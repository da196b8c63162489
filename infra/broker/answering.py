"""Whether a Kafka cluster answers."""

import logging

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

ASK_S = 2.0

_silent = logging.getLogger("groupstream.broker.answering")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False  # librdkafka logs each refused connection; a wait expects them


class Questioner:
    """Asks `bootstrap_servers` for their metadata; one client, so that a wait opens only one."""

    def __init__(self, bootstrap_servers: str) -> None:
        """Raises ValueError when librdkafka does not take the address list."""
        settings = {
            "bootstrap.servers": bootstrap_servers,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 250,
            "socket.connection.setup.timeout.ms": 2000,
        }
        self.last_answer = "no answer"
        try:
            self._client = AdminClient(settings, logger=_silent)
        except KafkaException as error:
            raise ValueError(f"bootstrap servers {bootstrap_servers!r}: {error}") from error

    def answers(self, ask_s: float = ASK_S) -> bool:
        """True when the cluster names a broker and a controller within `ask_s`."""
        try:
            metadata = self._client.list_topics(timeout=ask_s)
        except KafkaException as error:
            self.last_answer = str(error.args[0].str())
            return False
        self.last_answer = f"{len(metadata.brokers)} brokers, controller {metadata.controller_id}"
        return bool(metadata.brokers) and metadata.controller_id >= 0
