"""Which checkpoint a frozen role scores with, of which model, and what is wrong with the roles of a config.

A role (reference, teacher, reward model) is named by a path; its model is that of the run which wrote the checkpoint
(config.json beside it), or of a Hugging Face directory, so a teacher may be larger than its student. Roles score the
policy's tokens: the tokenizer must be the same.
Must not: import jax, or open a checkpoint (build_roles.py).
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_jax import schema
from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.mesh import MeshPlan
from rl_jax.model_source import same_tokenizer, with_source
from rl_jax.resume import CONFIG, checkpoint_of
from rl_jax.settings import CriticSettings, FrozenSettings, ModelSettings, Settings

# What learner.score can give, and the section of the role that computes it ("" = the policy itself).
NEEDED_ROLE = {
    "old_logprobs": "",
    "sum_squares": "",
    "rewards": "",
    "reference_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "teacher_divergence": "teacher",
    "reward_scores": "reward_model",
    "values": "critic",
}

REWARD_MODEL = "reward_model"
GIVEN = {"teacher": "teacher", REWARD_MODEL: "reward model"}  # roles that always come by a path


@dataclass(frozen=True)
class RoleSource:
    checkpoint: Path  # .../checkpoints/step_N, or a Hugging Face directory
    model: ModelSettings  # it was trained with

    @property
    def is_pretrained(self) -> bool:
        """Whether it is a Hugging Face directory."""
        return _is_pretrained(self.checkpoint)


def find_source(where: str, path: str, policy: ModelSettings) -> RoleSource:
    """The checkpoint that `where`.checkpoint=path means. policy: the model settings where none are beside it.

    Raises: ValueError, one line, if there is none, or it is of another tokenizer, or of another kind than the role.
    """
    key = f"{where}.checkpoint={path}"
    if _is_pretrained(Path(path)):
        return _pretrained(key, where, Path(path), policy)
    checkpoint = checkpoint_of(Path(path))
    if checkpoint is None:
        raise ValueError(
            f"{key} has no checkpoint; give a run directory that saved one, its checkpoints/step_N, or a Hugging Face"
            " directory"
        )
    model, config = policy, checkpoint.absolute().parent.parent / CONFIG
    trained_by = ""
    if config.exists():
        errors: list[str] = []
        try:
            stored = json.loads(config.read_text(encoding="utf-8"))
            model = schema.build(ModelSettings, stored["model"], "model", errors)
            trained_by = stored["algorithm"]["name"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        if errors:
            raise ValueError(
                f"{key}: {config} cannot be read: {errors[0]}; give another checkpoint"
            )
    makers = [name for name, entry in ALGORITHMS.items() if entry.makes_scores]
    if trained_by and (trained_by in makers) != (where == REWARD_MODEL):
        raise ValueError(
            f"{key} is a reward model (algorithm {trained_by}), which has no log-probs; give the checkpoint of a policy"
            if trained_by in makers
            else f"{key} was trained by {trained_by}, not by {' or '.join(makers)}, and has no score to give; train a"
            f" reward model with algorithm.name={makers[0]} on pairs"
        )
    _check_tokenizer(key, model, policy)
    return RoleSource(checkpoint, model)


def _is_pretrained(path: Path) -> bool:
    return (path / CONFIG).is_file() and bool(list(path.glob("*.safetensors")))


def _pretrained(key: str, where: str, path: Path, policy: ModelSettings) -> RoleSource:
    """Of a Hugging Face directory, in the dtypes of the policy."""
    if where == REWARD_MODEL:
        raise ValueError(
            f"{key} is a language model, which has no score to give; train a reward model with algorithm.name=rm"
        )
    base = ModelSettings(
        source=str(path), tokenizer=str(path), dtype=policy.dtype, param_dtype=policy.param_dtype
    )
    try:
        model = with_source(base)
    except ValueError as error:
        raise ValueError(f"{key}: {str(error).removeprefix(f'model.source={path}: ')}") from None
    _check_tokenizer(key, model, policy)
    return RoleSource(path.absolute(), model)


def _check_tokenizer(key: str, model: ModelSettings, policy: ModelSettings) -> None:
    if not same_tokenizer(model.tokenizer, policy.tokenizer):
        raise ValueError(
            f"{key} has model.tokenizer={model.tokenizer}, the policy {policy.tokenizer}: it could not read the"
            " policy's tokens; give a checkpoint of the same tokenizer"
        )


def vocabulary_error(where: str, model: ModelSettings, policy: ModelSettings, size: int) -> str:
    """Why a role's model cannot score every token of the policy's; "" if it can. size: of the tokenizer."""
    theirs, ours = model.vocab_size or size, policy.vocab_size or size
    if theirs >= ours:
        return ""
    return (
        f"{where}.checkpoint has a vocabulary of {theirs}, the policy of {ours}: tokens above would have no log-prob;"
        f" set model.vocab_size={theirs}, or give another checkpoint"
    )


def needed_roles(settings: Settings) -> frozenset[str]:
    """Sections of the roles that the config's algorithm and options need beside the policy."""
    return _roles_of(options.needs(settings.algorithm))


def _roles_of(needs: Collection[str]) -> frozenset[str]:
    return frozenset(filter(None, (NEEDED_ROLE.get(need) for need in needs)))


def role_errors(s: Settings, needs: Collection[str] | None = None) -> Iterator[str]:
    """What is wrong with the roles, alone and with algorithm and mesh; one line each.

    needs: of the algorithm itself, where there is one; None = what the settings tell, which is nothing of a plugin
    before it is loaded.
    """
    is_known = needs is not None or options.is_known(s.algorithm)
    needs = options.needs(s.algorithm) if needs is None else needs
    needed = _roles_of(needs)
    pools = [pool.name for pool in s.mesh.pools if pool.kind == "role"]
    used = set()
    for where, role, default in (
        ("critic", s.critic, CriticSettings()),
        ("reference", s.reference, FrozenSettings()),
        ("teacher", s.teacher, FrozenSettings()),
        ("reward_model", s.reward_model, FrozenSettings()),
    ):
        if where not in needed and is_known:
            for name, value in vars(role).items():
                if value != getattr(default, name):
                    yield (
                        f"{where}.{name}={value} is not read: no option of algorithm {s.algorithm.name} needs a"
                        f" {where}{_who_needs(where)}; leave it out"
                    )
            continue
        used.add(role.pool)
        if role.pool and role.pool not in pools:
            yield (
                f"{where}.pool={role.pool} is no pool of kind role of mesh {s.mesh.name}"
                f" ({', '.join(pools) or 'it has none'}); name one, or leave it empty for the train mesh"
            )
        elif where in needed:
            if role.pool and any(
                NEEDED_ROLE.get(need) == where for need in options.IN_STEP.intersection(needs)
            ):
                yield (
                    f"{where}.pool={role.pool}: {s.algorithm.name} runs the {where} inside the policy's step, on the"
                    f" train mesh; leave {where}.pool empty"
                )
            yield from _place_errors(s, where)
    for pool in sorted(set(pools) - used):
        yield (
            f"mesh pool {pool} is of kind role and no role is on it; set critic.pool, reference.pool, teacher.pool or"
            f" reward_model.pool to {pool}, or drop the pool"
        )
    if "critic" in needed:
        yield from _critic(s)


def _place_errors(s: Settings, where: str) -> Iterator[str]:
    """A needed role whose pool exists: has it weights, and do they lie there?"""
    role, model = getattr(s, where), s.model
    if where in GIVEN and not role.checkpoint:
        need = next(need for need, of in NEEDED_ROLE.items() if of == where)
        cause, _ = options.needed_by(s.algorithm, need)
        yield f"{cause} needs a {GIVEN[where]}; set {where}.checkpoint to a run directory or its checkpoints/step_N"
        return
    if where != "critic" and role.checkpoint:
        try:
            model = find_source(where, role.checkpoint, s.model).model
        except ValueError as error:
            yield str(error)
            return
    plan = MeshPlan.from_settings(s.mesh, s.model)
    if plan.train is None or (not role.pool and model == s.model):
        return  # the mesh check says it
    for error in plan.check_role(role.pool, model, s.learner):
        yield f"{where}: {error}"


def _critic(s: Settings) -> Iterator[str]:
    c = s.critic
    if c.head_start >= s.steps > 0:
        yield f"critic.head_start={c.head_start} leaves nothing of steps={s.steps} for the policy; lower it"
    if c.updates == 1 and c.value_clip not in (0.0, CriticSettings().value_clip):
        yield (
            f"critic.value_clip={c.value_clip} has no effect while critic.updates is 1: no value has moved yet; raise"
            " critic.updates, or leave it out"
        )
    total = s.steps * c.updates
    if c.warmup_steps > total > 0:
        yield (
            f"critic.warmup_steps={c.warmup_steps} is beyond the critic's {total} updates (steps={s.steps}); the full"
            " rate is never reached"
        )
    elif c.schedule != "constant" and c.warmup_steps == total > 0:
        yield (
            f"critic.warmup_steps={c.warmup_steps} leaves nothing of the critic's {total} updates for"
            f" critic.schedule={c.schedule}; lower it, or use constant"
        )
    left = s.steps - c.head_start
    if c.head_start and s.learner.schedule != "constant" and s.learner.warmup_steps >= left > 0:
        yield (
            f"learner.warmup_steps={s.learner.warmup_steps} leaves nothing of the {left} steps after"
            f" critic.head_start={c.head_start} for learner.schedule={s.learner.schedule}; lower it, or use constant"
        )


def _who_needs(where: str) -> str:
    """ " (PPO does)" and the like."""
    options_that = {
        "reference": "algorithm.kl.coef above 0",
        "teacher": "algorithm.teacher_coef above 0",
        REWARD_MODEL: "algorithm.reward_model_coef above 0",
    }
    names = [n for n, e in ALGORITHMS.items() if where in {NEEDED_ROLE.get(x) for x in e.needs}]
    first, *others = [*filter(None, [options_that.get(where)]), *names]
    return f" ({first} does{''.join(f', and {name}' for name in others)})"
