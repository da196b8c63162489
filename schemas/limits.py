"""Every size limit of broker, topics, producers and consumers, from two settings."""

from dataclasses import dataclass

MIB = 1024 * 1024
HEADER_ROOM = (
    64 * 1024
)  # a dead letter is a row and its headers; a group is its rows and its header
BATCH_OVERHEAD = 1024  # Kafka's record batch around one record
DEFAULT_ROW_BYTES = 16 * MIB
DEFAULT_GROUP_BYTES = 128 * MIB


@dataclass(frozen=True)
class Limits:
    """`row_bytes` and `group_bytes` are the largest encoded RolloutRow and AssembledGroup."""

    row_bytes: int = DEFAULT_ROW_BYTES
    group_bytes: int = DEFAULT_GROUP_BYTES

    @property
    def row_message_bytes(self) -> int:
        """max.message.bytes of `rows`."""
        return self.row_bytes + HEADER_ROOM + BATCH_OVERHEAD

    @property
    def dead_letter_message_bytes(self) -> int:
        """max.message.bytes of `dlq`: anything that `rows` took, and the headers that say why."""
        return self.row_message_bytes + HEADER_ROOM

    @property
    def group_message_bytes(self) -> int:
        """max.message.bytes of `groups`."""
        return self.group_bytes + HEADER_ROOM + BATCH_OVERHEAD

    @property
    def largest_message_bytes(self) -> int:
        """message.max.bytes and replica.fetch.max.bytes of the broker, and of a producer."""
        return max(self.dead_letter_message_bytes, self.group_message_bytes)

    @property
    def socket_request_bytes(self) -> int:
        """socket.request.max.bytes of the broker: a request carries the batch and its framing."""
        return self.largest_message_bytes + MIB
