import json

import pytest
import torch

from schemas.config import LossConfig
from schemas.errors import ConfigError
from tests.unit.rollouts import random_batch
from tests.unit.tiny_models import VOCAB, make_qwen2, policy_config
from trainer import checkpoint, parallel
from trainer.checkpoint import Progress
from trainer.megatron import Policy
from trainer.parallel import ModelParallel

PROGRESS = Progress(step=3, offsets={0: 12, 3: 7}, next_task_index=99)


@pytest.fixture(scope="module", autouse=True)
def _job():
    parallel.start(ModelParallel(), seed=1)
    yield
    parallel.stop()


def fresh(directory, precision="float32"):
    config = policy_config(
        directory,
        precision=precision,
        megatron_cfg={
            "optimizer": {"lr": 1e-3, "min_lr": 0.0},
            "scheduler": {"lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 2},
        },
    )
    return Policy(config, rollouts_per_step=16, max_num_steps=10)


def train(policy, steps):
    metrics = []
    for step in steps:
        batch = random_batch(vocab=VOCAB, seed=step)
        metrics.append(policy.train_step(batch, LossConfig(), prev_logprobs=policy.logprobs(batch)))
    return metrics


def weights_of(policy):
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_restored_run_has_the_same_bits(precision, tmp_path):
    directory = make_qwen2(tmp_path / "model")
    straight = fresh(directory, precision)
    train(straight, range(3))
    checkpoint.save(straight, tmp_path / "step-3", "epoch1", PROGRESS)
    noise = torch.rand(4)
    expected = train(straight, range(3, 5))

    restored = fresh(directory, precision)
    assert checkpoint.restore(restored, tmp_path / "step-3") == PROGRESS
    assert torch.equal(torch.rand(4), noise)
    assert train(restored, range(3, 5)) == expected
    ours, theirs = weights_of(restored), weights_of(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_initial_state_is_a_checkpoint(tmp_path):
    directory = make_qwen2(tmp_path / "model")
    straight = fresh(directory)
    checkpoint.save(straight, tmp_path / "step-0", "epoch1", Progress(0, {}, 0))
    expected = train(straight, range(2))
    restored = fresh(directory)
    train(restored, [7])
    checkpoint.restore(restored, tmp_path / "step-0")
    assert train(restored, range(2)) == expected


def test_only_a_complete_checkpoint_has_its_name(tmp_path):
    policy = fresh(make_qwen2(tmp_path / "model"))
    root = tmp_path / "checkpoints"
    checkpoint.save(policy, root / "step-3", "epoch1", PROGRESS)
    assert [path.name for path in root.iterdir()] == ["step-3"]
    with pytest.raises(FileExistsError, match="step-3 exists"):
        checkpoint.save(policy, root / "step-3", "epoch2", PROGRESS)
    assert checkpoint.read_progress(root / "step-3") == PROGRESS


def test_a_predecessors_partial_directory_is_not_in_the_way(tmp_path):
    policy = fresh(make_qwen2(tmp_path / "model"))
    left = tmp_path / ".step-3.partial-epoch1"
    left.mkdir()
    (left / "rubbish").write_text("")
    checkpoint.save(policy, tmp_path / "step-3", "epoch1", PROGRESS)
    assert not (tmp_path / "step-3" / "rubbish").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoint.read_progress(tmp_path)
    (tmp_path / "progress.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(ConfigError, match="has format 2, we read 1"):
        checkpoint.read_progress(tmp_path)
