import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from schemas.config import LossConfig
from schemas.errors import ConfigError
from tests.unit.rollouts import random_batch
from tests.unit.tiny_models import VOCAB, make_qwen2, policy_config
from trainer import cpu, parallel
from trainer.megatron import Policy
from trainer.parallel import ModelParallel
from trainer.weights import export_weights

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _job():
    parallel.start(ModelParallel(), seed=1)
    yield
    parallel.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_qwen2(tmp_path_factory.mktemp("qwen2") / "model", tie_word_embeddings=True)


def fresh(model, **more):
    return Policy(policy_config(model, **more), rollouts_per_step=16, max_num_steps=10)


def weights_of(policy):
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def steps(policy, count, loss=None):
    metrics = []
    for seed in range(count):
        batch = random_batch(vocab=VOCAB, seed=seed)
        prev = policy.logprobs(batch)
        metrics.append(policy.train_step(batch, loss or LossConfig(), prev_logprobs=prev))
    return metrics


def test_the_same_steps_give_the_same_bits(model):
    first, second = fresh(model), fresh(model)
    assert steps(first, 2) == steps(second, 2)
    assert same(weights_of(first), weights_of(second))


def test_a_step_raises_what_was_good_and_lowers_what_was_bad(model):
    policy = fresh(model)
    batch = random_batch(vocab=VOCAB)
    before = policy.logprobs(batch)
    metrics = policy.train_step(batch, LossConfig(), prev_logprobs=before)
    gain = (policy.logprobs(batch) - before) * batch.token_mask * batch.advantages
    assert gain.sum() > 0
    assert metrics["grad_norm"] > 0
    assert metrics["probs_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["global_valid_toks"] == batch.eligible_tokens


def test_micro_batches_are_one_update(model):
    small, large = fresh(model, micro_batch=2), fresh(model, micro_batch=8)
    ours, theirs = steps(small, 1), steps(large, 1)
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=1e-6)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-4)


def test_gradient_is_that_of_plain_autograd(model):
    """Against transformers: the whole objective, one backward pass, no micro-batches."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 slow

    batch = random_batch(vocab=VOCAB)
    policy = fresh(model)
    metrics = policy.train_step(batch, LossConfig(), prev_logprobs=policy.logprobs(batch))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = reference(batch.input_ids).logits[:, :-1]
    scored = torch.log_softmax(logits, -1).gather(2, batch.input_ids[:, 1:, None]).squeeze(2)
    mask = batch.token_mask[:, 1:] * batch.sample_mask.unsqueeze(1)
    ratio = (scored - scored.detach()).exp()
    loss = -(batch.advantages[:, 1:] * ratio * mask).sum() / mask.sum()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in reference.parameters()]).sum().sqrt()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_nothing_eligible_is_a_zero_update_that_the_schedule_counts(model):
    policy = fresh(
        model,
        megatron_cfg={
            "optimizer": {"lr": 1e-3, "min_lr": 0.0},
            "scheduler": {"lr_decay_style": "linear", "lr_decay_iters": 10},
        },
    )
    before = weights_of(policy)
    batch = random_batch(vocab=VOCAB)
    empty = replace(batch, sample_mask=torch.zeros_like(batch.sample_mask))
    metrics = policy.train_step(empty, LossConfig(), prev_logprobs=None)
    assert metrics["zero_update"] == 1
    assert same(before, weights_of(policy))
    after = policy.train_step(batch, LossConfig(), prev_logprobs=policy.logprobs(batch))
    assert after["zero_update"] == 0
    assert after["lr"] == pytest.approx(0.9e-3)


def test_schedule_counts_logical_rollouts_not_rows(model):
    policy = fresh(model)
    batch = random_batch(vocab=VOCAB, groups=3, size=3, row_multiple=16)
    assert (batch.rows, batch.logical_rollouts) == (16, 9)
    policy.train_step(batch, LossConfig(), prev_logprobs=policy.logprobs(batch))
    assert policy.schedule.num_steps == 9


def test_a_broken_gradient_leaves_the_weights_alone(model):
    policy = fresh(model)
    before = weights_of(policy)
    batch = random_batch(vocab=VOCAB)
    broken = replace(batch, advantages=torch.full_like(batch.advantages, torch.nan))
    with pytest.raises(RuntimeError, match="not finite"):
        policy.train_step(broken, LossConfig(), prev_logprobs=policy.logprobs(batch))
    assert same(before, weights_of(policy))


def test_the_reference_stays_where_it_was(model):
    policy = fresh(model)
    batch = random_batch(vocab=VOCAB)
    initial = policy.logprobs(batch)
    policy.keep_reference()
    config = LossConfig(reference_policy_kl_penalty=0.1)
    metrics = policy.train_step(
        batch,
        config,
        prev_logprobs=initial,
        reference_logprobs=policy.reference_logprobs(batch),
    )
    assert metrics["kl_penalty"] == pytest.approx(0, abs=1e-6)
    after = weights_of(policy)
    assert torch.equal(policy.reference_logprobs(batch), initial)
    assert same(after, weights_of(policy))
    assert not torch.equal(policy.logprobs(batch), initial)


def test_bfloat16_trains(model):
    policy = fresh(model, precision="bfloat16")
    batch = random_batch(vocab=VOCAB)
    exact = fresh(model).logprobs(batch)
    assert (policy.logprobs(batch) - exact).abs().mean() < 0.05
    before = weights_of(policy)
    metrics = steps(policy, 1)
    assert metrics[0]["grad_norm"] > 0
    assert not same(before, weights_of(policy))


def test_rows_that_do_not_divide_are_an_error_with_the_way_out(model):
    policy = fresh(model, micro_batch=5)
    with pytest.raises(ConfigError, match="row_multiple 5"):
        policy.logprobs(random_batch(vocab=VOCAB))


def test_two_ranks_agree_with_one(model, tmp_path):
    """Tensor, pipeline and data parallel, each trained, checkpointed, restored and exported."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "policy.json").write_text(policy_config(tmp_path / "model").model_dump_json())
    alone = fresh(model)
    logprobs = alone.logprobs(random_batch(vocab=VOCAB, seed=0))
    metrics = steps(alone, 2)
    export_weights(alone.model, alone.architecture, model, tmp_path / "alone", "epoch")
    expected = load_file(tmp_path / "alone" / "model.safetensors")

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("two_ranks.py")
    finished = subprocess.run(
        [*launch, str(script), str(tmp_path)],
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=480,  # two imports of megatron on a busy machine
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    for name in ("tensor", "pipeline", "data"):
        theirs = load_file(tmp_path / f"{name}.safetensors")["logprobs"]
        assert (theirs - logprobs).abs().max() < 1e-5, name
        for ours, found in zip(
            metrics, json.loads((tmp_path / f"{name}.json").read_text()), strict=False
        ):
            assert found["loss"] == pytest.approx(ours["loss"], abs=1e-5), name
            assert found["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3), name
        straight, restored = (
            read_all(tmp_path / f"{name}-{end}") for end in ("straight", "restored")
        )
        assert straight.keys() == expected.keys(), name
        assert same(straight, restored), name
        # Adam's first steps divide by the gradient's own size: rounding may move a tiny one
        drift = max((straight[key] - expected[key]).abs().max() for key in expected)
        assert drift < 5e-4, name


def read_all(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def test_the_shim_leaves_nothing_behind():
    # the last test of this module: the job's fixture is still running here
    assert cpu.device().type in ("cpu", "cuda")
    if cpu.device().type == "cpu":
        patched = torch.cuda.synchronize
        cpu.uninstall()
        assert torch.cuda.synchronize is not patched
        assert torch.empty(1, device="cpu").type() == "torch.FloatTensor"
        cpu.install()
