"""The teachers that the configuration names."""

from consumers.enrichment import TeacherOf
from consumers.teachers.endpoint import EndpointTeacher
from consumers.teachers.pool import Teachers
from consumers.teachers.teacher import Teacher
from consumers.teachers.vllm import VllmTeacher
from schemas.config import Config, TeachersConfig


def opened(config: Config, instance: str) -> Teachers:
    """Those that an agent may have; vLLM's begin to load. Raises ConfigError.

    The default one too: an agent that this configuration does not know would wait for it.
    """
    models = config.teachers.models
    used = {*config.teachers.agent_to_teacher.values(), config.teachers.default_teacher}
    needed = sorted(alias for alias in used if alias is not None)
    teachers: dict[str, Teacher] = {}
    for alias in needed:
        teachers[alias] = (
            VllmTeacher(
                alias,
                models[alias],
                max_tokens=config.policy.max_total_sequence_length,
                log_path=config.log_directory / f"assembler-{instance}.teacher-{alias}.log",
            )
            if models[alias].base_url is None
            else EndpointTeacher(models[alias])
        )
    return Teachers(teachers, {alias: 1 + models[alias].max_retries for alias in needed})


def teacher_of_agent(config: TeachersConfig) -> TeacherOf:
    """Its own, else the default one; None: its groups need no teacher."""

    def teacher_of(agent: str) -> str | None:
        return config.agent_to_teacher.get(agent, config.default_teacher)

    return teacher_of
