"""The run's frozen facts: made once at init, checked by every process at its start."""

import hashlib
import secrets
from pathlib import Path
from typing import Any

from schemas.config import Config
from schemas.control import ControlState
from schemas.errors import DatasetError, ManifestMismatch
from schemas.records import Manifest
from schemas.status import now_ms

STAMP_KEY_BYTES = 32
_CHUNK_BYTES = 1 << 20


def dataset_hash(path: str | Path) -> str:
    """SHA-256 of the file, in hex. Raises DatasetError where it can't be read."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise DatasetError(f"data.train_jsonl_fpath {path}: {error.strerror}") from error
    return digest.hexdigest()


def manifest_of(config: Config, *, first_step: int = 0, first_task_index: int = 0) -> Manifest:
    """The manifest of a new run, with a fresh stamp key."""
    return Manifest(
        **_frozen(config),
        dataset_hash=dataset_hash(config.data.train_jsonl_fpath),
        first_step=first_step,
        first_task_index=first_task_index,
        stamp_key=secrets.token_bytes(STAMP_KEY_BYTES),
        created_at_ms=now_ms(),
    )


def require_manifest(state: ControlState, config: Config) -> Manifest:
    """Raises ManifestMismatch where the run has none, or it differs from `config`."""
    manifest = state.manifest
    if manifest is None:
        raise ManifestMismatch(
            f"run {config.run.id} has no manifest: create it with `groupstream-init` first"
        )
    for name, ours in _frozen(config).items():
        theirs = getattr(manifest, name)
        if ours != theirs:
            raise ManifestMismatch(
                f"run {config.run.id} was created with {name} = {theirs!r}, this file says "
                f"{ours!r}: restore the old value, or start a new run under another run.id"
            )
    return manifest


def require_dataset(manifest: Manifest, config: Config) -> None:
    """Raises ManifestMismatch where the dataset is another than the run began with."""
    ours = dataset_hash(config.data.train_jsonl_fpath)
    if ours != manifest.dataset_hash:
        raise ManifestMismatch(
            f"{config.data.train_jsonl_fpath} has SHA-256 {ours}, the run began with "
            f"{manifest.dataset_hash}: restore the file, or start a new run under another run.id"
        )


def _frozen(config: Config) -> dict[str, Any]:
    return {
        "run_id": config.run.id,
        "num_partitions": config.kafka.num_partitions,
        "num_prompts_per_step": config.grpo.num_prompts_per_step,
        "num_generations_per_prompt": config.grpo.num_generations_per_prompt,
        "lead": config.grpo.lead,
        "max_trajectory_age_steps": config.grpo.max_age,
        "shards": {name: shard.replicas for name, shard in config.all_shards.items()},
        "max_row_bytes": config.kafka.max_row_bytes,
        "max_group_bytes": config.kafka.max_group_bytes,
    }
