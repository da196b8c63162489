"""Rank 0 decides, all ranks do: each decision is told to the others, then done on every rank.

Only rank 0 reads Kafka, so only it knows which groups a step takes; the others hear them as the
encoded records and build the same batch. What is told is msgpack in a tensor of bytes.

    rank 0        Ranks.train(...)  ── Train ──▶  follow(): Job.train(...)   the other ranks
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import distributed

from schemas.codec import decode_as, encode
from schemas.records import AssembledGroup
from trainer import cpu
from trainer.checkpoint import Progress
from trainer.job import Job, Trained
from trainer.traces import TrainingBatch, build_batch

KEEP_ALIVE_S = 5.0  # far below the deadline of the others' collective


class Build(msgspec.Struct, frozen=True, tag=True):
    checkpoint: str | None


class Train(msgspec.Struct, frozen=True, tag=True):
    groups: list[bytes]


class Export(msgspec.Struct, frozen=True, tag=True):
    target: str
    token: str


class Save(msgspec.Struct, frozen=True, tag=True):
    target: str
    token: str
    progress: Progress


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Nothing yet; hear again."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The job ends."""


Command = Build | Train | Export | Save | Wait | End


class Ranks:
    """Rank 0's hand on all ranks, itself included."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._others = distributed.get_world_size() - 1
        self._told_at = time.monotonic()

    @property
    def count(self) -> int:
        return self._others + 1

    def build(self, checkpoint: Path | None) -> None:
        self._tell(Build(None if checkpoint is None else str(checkpoint)))
        self._job.build(checkpoint)

    def batch(self, groups: Sequence[AssembledGroup]) -> TrainingBatch:
        """The rows of a step, built on rank 0 alone. Raises ValueError as `build_batch`."""
        return build_batch([group.rows for group in groups], self._job.batch_settings)

    def train(self, groups: Sequence[AssembledGroup], batch: TrainingBatch) -> Trained:
        """`batch` is that of `groups`."""
        if self._others:
            self._tell(Train([encode(group) for group in groups]))
        return self._job.train(batch)

    def export(self, target: Path, token: str) -> None:
        self._tell(Export(str(target), token))
        self._job.export(target, token)

    def save(self, target: Path, token: str, progress: Progress) -> None:
        self._tell(Save(str(target), token, progress))
        self._job.save(target, token, progress)

    def keep_alive(self) -> None:
        """Called while rank 0 waits, so that the others' wait never reaches its deadline."""
        if time.monotonic() - self._told_at >= KEEP_ALIVE_S:
            self._tell(Wait())

    def end(self) -> None:
        self._tell(End())

    def _tell(self, command: Command) -> None:
        self._told_at = time.monotonic()
        if self._others:
            _broadcast(msgspec.msgpack.encode(command))


def follow(job: Job) -> None:
    """Does what rank 0 says until it ends the job. Every rank but 0."""
    decoder = msgspec.msgpack.Decoder(Command)
    while True:
        match decoder.decode(_hear()):
            case Build(checkpoint):
                job.build(None if checkpoint is None else Path(checkpoint))
            case Train(payloads):
                groups = [decode_as(payload, AssembledGroup) for payload in payloads]
                job.train(build_batch([group.rows for group in groups], job.batch_settings))
            case Export(target, token):
                job.export(Path(target), token)
            case Save(target, token, progress):
                job.save(Path(target), token, progress)
            case End():
                return


def _broadcast(payload: bytes) -> None:
    device = cpu.device()
    distributed.broadcast(torch.tensor([len(payload)], dtype=torch.int64, device=device), src=0)
    distributed.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device), src=0)


def _hear() -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=cpu.device())
    distributed.broadcast(length, src=0)
    payload = torch.zeros(int(length.item()), dtype=torch.uint8, device=cpu.device())
    distributed.broadcast(payload, src=0)
    return payload.cpu().numpy().tobytes()
