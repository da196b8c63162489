"""One rank's part of the training job: what rank 0 decides, every rank does, at the same time."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from schemas.config import Config
from schemas.errors import ConfigError
from trainer import checkpoint, weights
from trainer.checkpoint import Progress
from trainer.megatron import Policy
from trainer.parallel import data_parallel_size
from trainer.settings import pad_token_id
from trainer.traces import BatchSettings, TrainingBatch


@dataclass(frozen=True)
class Trained:
    """Metrics of one update and the log-probabilities [rows, S] before it.

    Without an eligible token there are no log-probabilities.
    """

    metrics: dict[str, float]
    prev_logprobs: Tensor | None


class Job:
    """All methods are collective. `build` comes first; `parallel.start` before that."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._source = Path(config.policy.model_name)
        self._policy: Policy | None = None
        self.batch_settings = BatchSettings.from_config(
            config,
            pad_token_id=pad_token_id(self._source),
            data_parallel_size=data_parallel_size(),
        )

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("build() must come first")
        return self._policy

    def build(self, directory: Path | None) -> None:
        """The policy of `policy.model_name`, or that of the checkpoint `directory`.

        Raises ConfigError where the checkpoint is missing or incomplete.
        """
        if directory is not None and not directory.is_dir():
            raise ConfigError(
                f"the run's checkpoint {directory} is not there: restore the directory, or start "
                "a new run from exported weights"
            )
        grpo = self._config.grpo
        self._policy = Policy(
            self._config.policy,
            rollouts_per_step=grpo.num_prompts_per_step * grpo.num_generations_per_prompt,
            max_num_steps=grpo.max_num_steps,
        )
        if self._config.loss_fn.reference_policy_kl_penalty != 0:
            self._policy.keep_reference()  # of the run's first weights, so before the restore
        if directory is not None:
            checkpoint.restore(self._policy, directory)

    def train(self, batch: TrainingBatch) -> Trained:
        """One optimizer update, or none where no token is eligible."""
        loss = self._config.loss_fn
        if batch.eligible_tokens == 0:
            return Trained(self.policy.train_step(batch, loss, prev_logprobs=None), None)
        prev_logprobs = self.policy.logprobs(batch)
        reference = (
            self.policy.reference_logprobs(batch) if loss.reference_policy_kl_penalty != 0 else None
        )
        metrics = self.policy.train_step(
            batch, loss, prev_logprobs=prev_logprobs, reference_logprobs=reference
        )
        return Trained(metrics, prev_logprobs)

    def export(self, target: Path, token: str) -> None:
        """The weights as a Hugging Face directory."""
        target.parent.mkdir(parents=True, exist_ok=True)
        weights.export_weights(
            self.policy.model, self.policy.architecture, self._source, target, token
        )

    def save(self, target: Path, token: str, progress: Progress) -> None:
        """A checkpoint; it counts once `control` records it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(self.policy, target, token, progress)
