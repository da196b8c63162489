"""kafka-python's admin client with the settings that `kafka.client` gives by librdkafka's names."""

from collections.abc import Mapping
from typing import Any

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from schemas.clients import bootstrap_servers
from schemas.config import KafkaConfig
from schemas.errors import DeadlineExceeded

REQUEST_MS = 10_000
NAMES = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}


def security_of(client: Mapping[str, str]) -> dict[str, str]:
    """How to be let in. Settings of speed and size mean nothing to this client. Pure."""
    return {
        NAMES[name]: value.upper() if name == "security.protocol" else value
        for name, value in client.items()
        if name in NAMES
    }


def admin_client(kafka: KafkaConfig, client_id: str) -> Any:
    """Connected. Raises DeadlineExceeded."""
    servers = bootstrap_servers(kafka)
    try:
        return KafkaAdminClient(
            bootstrap_servers=servers.split(","),
            client_id=client_id,
            request_timeout_ms=REQUEST_MS,
            **security_of(kafka.client),
        )
    except KafkaError as error:
        raise DeadlineExceeded(
            f"no Kafka broker answers at {servers} ({error}): start it, or correct "
            "kafka.bootstrap_servers"
        ) from error
