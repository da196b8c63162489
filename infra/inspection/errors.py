"""What the tools refuse, and what they could not do."""

from schemas.errors import GroupstreamError


class NotThere(GroupstreamError):
    """No such task, or no such dead letter; the message says what there is."""


class AlreadyResolved(GroupstreamError):
    """The letter was replayed or dropped before."""


class NothingWritten(GroupstreamError):
    """A batch of resolutions was aborted: neither its records nor its marks count."""


class TopicUnreadable(GroupstreamError):
    """Kafka refused to give a part of a topic; the message names it."""
