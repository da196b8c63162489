"""What test_megatron.py runs on two ranks: python -m torch.distributed.run two_ranks.py <root>.

For each way to use two ranks: log-probabilities, two steps, a checkpoint between them, weights.
"""

import json
import sys
from pathlib import Path

from megatron.core import parallel_state
from safetensors.torch import save_file

from schemas.config import LossConfig, PolicyConfig
from tests.unit.rollouts import random_batch
from trainer import checkpoint, parallel
from trainer.megatron import Policy
from trainer.parallel import ModelParallel
from trainer.weights import export_weights

LAYOUTS = {
    "tensor": ModelParallel(tensor=2),
    "pipeline": ModelParallel(pipeline=2),
    "data": ModelParallel(),
}


def run(root: Path, name: str, config: PolicyConfig) -> None:
    model = root / "model"
    policy = Policy(config, rollouts_per_step=16, max_num_steps=10)
    batches = [random_batch(vocab=policy.architecture.vocab_size, seed=s) for s in range(2)]
    metrics = []

    def step(number: int) -> None:
        batch = batches[number]
        logprobs = policy.logprobs(batch)
        if number == 0 and parallel.is_first_rank():
            save_file({"logprobs": logprobs}, root / f"{name}.safetensors")
        metrics.append(policy.train_step(batch, LossConfig(), prev_logprobs=logprobs))

    def export(label: str) -> None:
        target = root / f"{name}-{label}"
        export_weights(policy.model, policy.architecture, model, target, "epoch")

    step(0)
    progress = checkpoint.Progress(1, {0: 1}, 16)
    checkpoint.save(policy, root / f"{name}-checkpoint", "epoch", progress)
    step(1)
    export("straight")
    checkpoint.restore(policy, root / f"{name}-checkpoint")
    step(1)
    export("restored")
    if parallel.is_first_rank():
        (root / f"{name}.json").write_text(json.dumps(metrics))


def main() -> None:
    root = Path(sys.argv[1])
    config = PolicyConfig.model_validate_json((root / "policy.json").read_text())
    for name, layout in LAYOUTS.items():
        parallel.start(layout, seed=1, timeout_s=60)
        run(root, name, config)
        parallel_state.destroy_model_parallel()
    parallel.stop()


if __name__ == "__main__":
    main()
