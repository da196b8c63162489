"""Every error that groupstream raises on purpose, by what the reader of it can do."""


class GroupstreamError(Exception):
    """Something that a user can act on; the command line prints it without a traceback."""


class ConfigError(GroupstreamError):
    """The configuration is wrong; the message names the key and the way out."""


class DatasetError(GroupstreamError):
    """The dataset is wrong; the message names file, line and field."""


class ManifestMismatch(GroupstreamError):
    """This process and the run's manifest differ in a frozen value; both are in the message."""


class RunStopped(GroupstreamError):
    """The run was declared fatal on `control`; the message is that declaration's."""


class Fenced(GroupstreamError):
    """A newer process with the same role took over; this one must end."""


class DeadlineExceeded(GroupstreamError):
    """A wait ended without what it waited for; the message says for what and how long."""


class RecordUnreadable(GroupstreamError):
    """Bytes that are no record we know: malformed, truncated, or of an unknown schema."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RowRejected(GroupstreamError):
    """A row that must not be trained. `reason` is a code for the dead letter's header."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RecordTooLarge(GroupstreamError):
    """A record over its limit; the message has both numbers."""


class MetadataUnreadable(GroupstreamError):
    """Committed offset metadata that does not decode; nothing is assumed in its place."""


class OrdinalTooFar(GroupstreamError):
    """A task too far above the watermark of its partition to fit the commit."""


class OffsetsLost(GroupstreamError):
    """The committed position is gone or out of range; the message lists what would be lost."""


class GroupsContradict(GroupstreamError):
    """`groups` holds what its rules exclude: a task twice, or more groups than a step takes."""


class TransactionsFail(GroupstreamError):
    """One transaction after the other came to nothing; the message has the first reason."""
