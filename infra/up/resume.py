"""`groupstream resume`: takes the `fatal` of a run back, with a tombstone on `control`."""

from confluent_kafka import Producer

from infra.init import connected_admin, control_state
from infra.up.run import Note, Session
from schemas.clients import producer_config
from schemas.config import Config
from schemas.errors import DeadlineExceeded, ManifestMismatch
from schemas.manifest import require_manifest
from schemas.records import Fatal
from schemas.topics import CONTROL_FATAL, Topics

WRITE_S = 30.0


def resume(running: Session, note: Note) -> Fatal | None:
    """The declaration that was taken back; None where there is none.

    Raises ManifestMismatch where the run does not exist or has finished, DeadlineExceeded.
    """
    config = running.config
    topics = Topics(config.run.id)
    if topics.control not in connected_admin(config).list_topics(timeout=WRITE_S).topics:
        raise ManifestMismatch(f"run {config.run.id} does not exist: nothing to resume")
    state = control_state(config)
    require_manifest(state, config)
    if state.fatal is not None:
        _take_back(config, topics)
        note(f"taken back: {state.fatal.message}")
    return state.fatal


def _take_back(config: Config, topics: Topics) -> None:
    producer = Producer(producer_config(config.kafka, f"{config.run.id}.resume"))
    producer.produce(topics.control, None, CONTROL_FATAL.encode(), partition=0)
    if producer.flush(WRITE_S):
        raise DeadlineExceeded(
            f"the tombstone on {topics.control} was not acknowledged within {WRITE_S:.0f} s: does "
            "the broker answer?"
        )
