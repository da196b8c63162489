"""The one configuration of all roles: NeMo RL's key names, plus `run`, `kafka`, `shards`.

Unknown keys are rejected with the nearest known one, and keys of NeMo RL that groupstream does
not support are rejected with the reason: nothing is ever ignored.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.limits import DEFAULT_GROUP_BYTES, DEFAULT_ROW_BYTES, Limits

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class RunConfig(Section):
    id: Name = Field(description="The run's id; all topics carry it and it is never reused.")
    directory: str = Field(
        "build/runs", description="Weights, checkpoints, logs and metrics go to <directory>/<id>."
    )


class KafkaConfig(Section):
    bootstrap_servers: str | None = Field(
        None, description="An existing cluster; without it `groupstream up` starts a broker."
    )
    num_partitions: Count = Field(4, description="P: partitions of rows, groups, events and dlq.")
    max_row_bytes: Annotated[int, Field(ge=1024)] = Field(
        DEFAULT_ROW_BYTES, description="Largest encoded row; other limits derive from both."
    )
    max_group_bytes: Annotated[int, Field(ge=1024)] = Field(
        DEFAULT_GROUP_BYTES, description="Largest encoded group."
    )
    assembler_memory_bytes: Count = Field(
        1024 * 1024 * 1024,
        description="Budget for buffered rows of one assembler; teachers' answers come on top.",
    )
    group_protocol: Literal["classic", "consumer"] = Field(
        "classic", description="consumer = the new rebalance protocol (KIP-848)."
    )
    session_timeout_ms: Count = Field(10_000, description="A silent consumer is dead after this.")
    transaction_timeout_ms: Count = Field(
        15_000, description="The broker aborts a transaction that stays open longer."
    )
    replication_factor: Count = Field(1, description="Of the run's topics.")
    client: dict[str, str] = Field(
        default_factory=dict,
        description="More settings of every client, by librdkafka's names: security, SASL, ...",
    )

    @property
    def limits(self) -> Limits:
        return Limits(row_bytes=self.max_row_bytes, group_bytes=self.max_group_bytes)


class DataConfig(Section):
    train_jsonl_fpath: str = Field(description="Prompts, one a line, in NeMo Gym's row format.")
    shuffle: bool = Field(True, description="Another order each epoch, from grpo.seed.")


class AsyncGRPOConfig(Section):
    enabled: bool = Field(False, description="False: every group is on-policy.")
    max_trajectory_age_steps: NonNegative = Field(
        1, description="How many versions a group may be behind the step that trains it."
    )
    max_generation_failures: NonNegative = Field(
        0, description="More tasks than this abandoned in a row stop the run."
    )
    in_flight_weight_updates: bool = Field(
        True, description="Generations go on under new weights; False waits for them first."
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="Drop the running requests' KV cache when weights change."
    )


class GRPOConfig(Section):
    num_prompts_per_step: Count = Field(32, description="N: groups of a step.")
    num_generations_per_prompt: Count = Field(16, description="G: rows of a group.")
    max_num_epochs: Count = Field(1, description="Passes over the data.")
    max_num_steps: Count = Field(1_000_000, description="Optimizer steps.")
    normalize_rewards: bool = Field(True, description="Divide advantages by the group's std.")
    use_leave_one_out_baseline: bool = Field(True, description="Baseline without the row itself.")
    advantage_clip_low: float | None = Field(None, description="Lower clamp after normalising.")
    advantage_clip_high: float | None = Field(None, description="Upper clamp after normalising.")
    overlong_filtering: bool = Field(False, description="Do not train truncated rows.")
    gym_multi_trace: bool = Field(
        False, description="Train every trace of a rollout; False masks rows with several."
    )
    seed: int = Field(42, description="Seed of data order, sampling and initialisation.")
    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()

    @property
    def lead(self) -> int:
        """How many steps generation may run ahead of the policy."""
        return self.max_age

    @property
    def max_age(self) -> int:
        return self.async_grpo.max_trajectory_age_steps if self.async_grpo.enabled else 0


class LossConfig(Section):
    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="Coefficient of the KL term.")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator.")
    kl_input_clamp_value: float | None = Field(20.0, description="Clamp of the log ratio.")
    kl_output_clamp_value: float | None = Field(10.0, description="Clamp of the estimate.")
    ratio_clip_min: float = Field(0.2, ge=0, description="Ratio is clipped to 1 - this.")
    ratio_clip_max: float = Field(0.2, ge=0, description="Ratio is clipped to 1 + this.")
    ratio_clip_c: float | None = Field(None, description="Dual clip for negative advantages, > 1.")
    token_level_loss: bool = Field(True, description="Mean over tokens; False: over rows.")
    sequence_level_importance_ratios: bool = Field(False, description="One ratio a sequence.")
    use_importance_sampling_correction: bool = Field(
        False,
        description="Weigh by exp(trainer's - generator's logprob); needed when asynchronous.",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None, description="How large correction weights are bounded."
    )
    truncated_importance_sampling_ratio: float | None = Field(None, description="Upper bound.")
    truncated_importance_sampling_ratio_min: float | None = Field(None, description="Lower bound.")
    use_on_policy_kl_approximation: bool = Field(
        False, description="KL weighed by exp(curr - gen)."
    )
    force_on_policy_ratio: bool = Field(False, description="Ratio 1 with its gradient.")
    disable_ppo_ratio: bool = Field(False, description="REINFORCE: the logprob for the ratio.")

    @model_validator(mode="after")
    def _consistent(self) -> "LossConfig":
        if self.truncated_importance_sampling_type and not self.use_importance_sampling_correction:
            raise ValueError(
                "truncated_importance_sampling_type needs use_importance_sampling_correction: true"
            )
        if self.truncated_importance_sampling_type and not self.truncated_importance_sampling_ratio:
            raise ValueError(
                "truncated_importance_sampling_type needs truncated_importance_sampling_ratio"
            )
        needs_min = self.truncated_importance_sampling_type in ("icepop", "seq-mask-tis")
        if needs_min and self.truncated_importance_sampling_ratio_min is None:
            raise ValueError(
                f"{self.truncated_importance_sampling_type} needs "
                "truncated_importance_sampling_ratio_min"
            )
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError("sequence_level_importance_ratios needs token_level_loss: false")
        by_sequence = self.sequence_level_importance_ratios
        if by_sequence and self.truncated_importance_sampling_type == "seq-mask-tis":
            raise ValueError(
                "seq-mask-tis weighs tokens, so sequence_level_importance_ratios must be false"
            )
        if self.disable_ppo_ratio and (by_sequence or self.ratio_clip_c is not None):
            raise ValueError(
                "disable_ppo_ratio leaves no ratio for sequence_level_importance_ratios or "
                "ratio_clip_c"
            )
        bounded = self.truncated_importance_sampling_ratio is not None
        if bounded and self.truncated_importance_sampling_type is None:
            raise ValueError(
                "truncated_importance_sampling_ratio needs truncated_importance_sampling_type"
            )
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ValueError(f"ratio_clip_c is {self.ratio_clip_c}, it must be above 1")
        return self


class VllmConfig(Section):
    precision: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "auto", description="dtype of the generation weights."
    )
    max_model_len: Count | None = Field(
        None, description="Context length; null = policy.max_total_sequence_length."
    )
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1, description="Ignored on CPU.")
    tensor_parallel_size: Count = Field(1, description="GPUs of one engine.")
    enforce_eager: bool = Field(True, description="No graph capture.")
    max_num_seqs: Count = Field(128, description="Requests in one batch.")
    kv_cache_gib: Count = Field(1, description="KV cache on CPU, GiB.")


class GenerationConfig(Section):
    backend: Literal["vllm"] = Field("vllm", description="The engine, in the shard's process.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Only 1.0 gives exact logprobs.")
    top_k: Count | None = Field(None, description="Only null gives exact logprobs.")
    max_new_tokens: Count | None = Field(
        None, description="Budget of one model call; null = policy.max_total_sequence_length."
    )
    vllm_cfg: VllmConfig = VllmConfig()


class OptimizerConfig(Section):
    optimizer: Literal["adam"] = Field("adam", description="Megatron's Adam with decoupled decay.")
    lr: float = Field(5e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(5e-7, ge=0, description="Learning rate at the end of the decay.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    adam_beta1: float = Field(0.9, description="First moment.")
    adam_beta2: float = Field(0.999, description="Second moment.")
    adam_eps: float = Field(1e-8, description="Denominator floor.")
    clip_grad: float | None = Field(None, description="null = policy.max_grad_norm.")


class SchedulerConfig(Section):
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape."
    )
    lr_decay_iters: Count | None = Field(None, description="Steps; null = grpo.max_num_steps.")
    lr_warmup_iters: NonNegative = Field(0, description="Steps of linear warm-up.")
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate at step 0 of the warm-up.")


class MegatronConfig(Section):
    enabled: Literal[True] = Field(True, description="The only trainer.")
    tensor_model_parallel_size: Count = Field(1, description="Ranks of one tensor shard.")
    pipeline_model_parallel_size: Count = Field(1, description="Pipeline stages.")
    data_parallel_size: Count = Field(1, description="Replicas; ranks = product of the three.")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()


class PolicyConfig(Section):
    model_name: str = Field(description="Directory of a Hugging Face model: Llama or Qwen2 style.")
    train_global_batch_size: Count | None = Field(
        None, description="Rows of one update; null or N x G, nothing else."
    )
    train_micro_batch_size: Count = Field(4, description="Rows of one forward and backward.")
    logprob_batch_size: Count | None = Field(None, description="null = train_micro_batch_size.")
    max_total_sequence_length: Count = Field(512, description="Tokens of a prompt and its answer.")
    make_sequence_length_divisible_by: Count = Field(1, description="Padding multiple.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping.")
    precision: Literal["float32", "bfloat16"] = Field("bfloat16", description="Of the training.")
    generation: GenerationConfig = GenerationConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()


class AgentConfig(Section):
    gym: str = Field(description="module:Class of the gym that hosts the agent.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Handed to the gym.")


class EnvConfig(Section):
    agents: dict[Name, AgentConfig] = Field(min_length=1, description="Every agent by name.")
    should_mask_flagged_samples: bool = Field(True, description="Honour mask_sample of results.")
    attempt_deadline_s: Seconds = Field(600.0, description="Longest run of one attempt.")
    max_attempts: Count = Field(4, description="The first dispatch and its repetitions.")


class ShardConfig(Section):
    agents: list[Name] = Field(min_length=1, description="The agents that it hosts.")
    replicas: Count = Field(1, description="Processes of the shard.")
    max_concurrent_groups: Count = Field(16, description="Attempts that one replica runs at once.")


class TeacherConfig(Section):
    model_name: str = Field(
        description="Directory of a Hugging Face model with the policy's tokens; with a base_url "
        "the name that the server knows it by."
    )
    base_url: str | None = Field(
        None,
        description="An OpenAI-compatible server, as http://host:8000/v1; null = vLLM in a "
        "process of the assembler's own.",
    )
    api_key_env: str | None = Field(
        None, description="Name of the environment variable that holds the server's key."
    )
    timeout_s: Seconds = Field(120.0, description="Of one try, for all rows of a group.")
    max_retries: NonNegative = Field(2, description="Tries after the first one failed.")
    vllm_cfg: VllmConfig = VllmConfig()


class TeachersConfig(Section):
    models: dict[Name, TeacherConfig] = Field(
        default_factory=dict, description="Teachers by alias; none = no teacher log-probabilities."
    )
    agent_to_teacher: dict[Name, Name] = Field(
        default_factory=dict, description="The alias of each agent's teacher."
    )
    default_teacher: Name | None = Field(
        None, description="Alias for agents that agent_to_teacher leaves out; null = no teacher."
    )
    strict: bool = Field(
        False, description="An agent that agent_to_teacher leaves out is an error at start."
    )


class CheckpointingConfig(Section):
    enabled: Literal[True] = Field(True, description="A run without checkpoints cannot restart.")
    checkpoint_dir: str | None = Field(None, description="null = <run directory>/checkpoints.")
    save_period: Count = Field(10, description="Steps between checkpoints.")
    keep_top_k: Count = Field(3, description="How many of the newest are kept.")


class WandbConfig(Section):
    log_nemo_gym_full_result_tables: bool = Field(
        False, description="Rows carry the gym's full result as JSON; needs wandb_enabled."
    )


class LoggerConfig(Section):
    wandb_enabled: Literal[False] = Field(False, description="Not supported yet; keep false.")
    wandb: WandbConfig = WandbConfig()
    metrics_port: int | None = Field(
        None, description="Prometheus port of the monitor; null = off."
    )


class Config(Section):
    """Every key of the YAML file; see README.md for the table."""

    run: RunConfig
    kafka: KafkaConfig = KafkaConfig()
    data: DataConfig
    grpo: GRPOConfig = GRPOConfig()
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig
    env: EnvConfig
    shards: dict[Name, ShardConfig] = Field(
        default_factory=dict, description="By name; none = one shard that hosts every agent."
    )
    teachers: TeachersConfig = TeachersConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        rows = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        if self.policy.train_global_batch_size not in (None, rows):
            raise ValueError(
                f"policy.train_global_batch_size is {self.policy.train_global_batch_size}, and "
                f"grpo.num_prompts_per_step x grpo.num_generations_per_prompt is {rows}: one step "
                "is one update, so leave it null or make them equal"
            )
        if self.grpo.max_age > 0 and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                "grpo.async_grpo.enabled needs loss_fn.use_importance_sampling_correction: true, "
                "because groups are generated by older weights"
            )
        if self.policy.generation.top_p != 1.0 or self.policy.generation.top_k is not None:
            raise ValueError(
                "policy.generation.top_p must be 1.0 and top_k null: the trainer's "
                "log-probabilities are those of the whole distribution"
            )
        if self.logger.wandb.log_nemo_gym_full_result_tables and not self.logger.wandb_enabled:
            raise ValueError(
                "logger.wandb.log_nemo_gym_full_result_tables needs logger.wandb_enabled: true"
            )
        self._check_teachers()
        hosted: dict[str, str] = {}
        for name, shard in self.shards.items():
            for agent in shard.agents:
                if agent not in self.env.agents:
                    raise ValueError(
                        f"shards.{name}.agents names {agent!r}, which env.agents does not have: "
                        f"{sorted(self.env.agents)}"
                    )
                if agent in hosted:
                    raise ValueError(
                        f"agent {agent!r} is hosted by shards {hosted[agent]!r} and {name!r}: "
                        "a prompt could go to either; name it in one"
                    )
                hosted[agent] = name
        return self

    def _check_teachers(self) -> None:
        """Raises ValueError for an alias or an agent that does not exist, or has no teacher."""
        teachers, agents = self.teachers, self.env.agents
        named = teachers.agent_to_teacher | (
            {"default_teacher": teachers.default_teacher} if teachers.default_teacher else {}
        )
        for who, alias in named.items():
            if alias not in teachers.models:
                raise ValueError(
                    f"teachers: {who} has teacher {alias!r}, which teachers.models does not have: "
                    f"{sorted(teachers.models)}"
                )
        for agent in teachers.agent_to_teacher:
            if agent not in agents:
                raise ValueError(
                    f"teachers.agent_to_teacher names agent {agent!r}, which env.agents does not "
                    f"have: {sorted(agents)}"
                )
        left_out = sorted(set(agents) - set(teachers.agent_to_teacher))
        if teachers.strict and left_out:
            raise ValueError(
                f"teachers.strict: agents {left_out} have no entry in teachers.agent_to_teacher; "
                "add them, or set strict: false, and default_teacher is theirs"
            )

    @property
    def all_shards(self) -> dict[str, ShardConfig]:
        """`shards`, or the one shard that hosts every agent."""
        return self.shards or {"gym": ShardConfig(agents=sorted(self.env.agents))}

    @property
    def shard_of_agent(self) -> dict[str, str]:
        return {a: name for name, shard in self.all_shards.items() for a in shard.agents}

    @property
    def run_directory(self) -> Path:
        return Path(self.run.directory).absolute() / self.run.id

    @property
    def weights_directory(self) -> Path:
        return self.run_directory / "weights"

    @property
    def checkpoint_directory(self) -> Path:
        """The run's own: retention in a directory of several runs would remove another's."""
        configured = self.checkpointing.checkpoint_dir
        if configured is None:
            return self.run_directory / "checkpoints"
        return Path(configured).absolute() / self.run.id

    @property
    def metrics_path(self) -> Path:
        """One JSON line a step, with the list of its tasks."""
        return self.run_directory / "metrics.jsonl"

    @property
    def log_directory(self) -> Path:
        return self.run_directory / "logs"

    @property
    def max_new_tokens(self) -> int:
        return self.policy.generation.max_new_tokens or self.policy.max_total_sequence_length
