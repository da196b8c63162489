"""How many processes the trainer is."""

from schemas.config import Config


def ranks_of(config: Config) -> int:
    parallel = config.policy.megatron_cfg
    return (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.data_parallel_size
    )
