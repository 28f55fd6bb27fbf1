"""MeshPlan: the resolved placement of pools on devices, as servers and one train mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from rl_jax.mesh.check import Sizes, mesh_errors, plan_errors
from rl_jax.mesh.rules import (
    SERVE_RULES,
    SERVING,
    TRAIN_RULES,
    Rules,
    cut,
    full_axes,
    merge_rules,
    ranges,
)
from rl_jax.settings import (
    EngineSettings,
    LearnerSettings,
    MeshSettings,
    ModelSettings,
    PoolSettings,
)

MAX_DEVICES = 1 << 16  # a larger count is a slip; check refuses it without a list that long


@dataclass(frozen=True)
class ServerPlan:
    name: str  # "<pool>.<replica>"
    pool: str
    kind: str  # prefill | decode | colocated (serves as decode)
    devices: tuple[int, ...]  # indices, in mesh order (AXES, row-major)
    axes: Mapping[str, int]  # all of AXES
    rules: Rules
    hardware: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class TrainPlan:
    """One mesh that a learner's programs run on: the policy's, or that of a critic or a frozen policy."""

    pool: str
    devices: tuple[int, ...]
    axes: Mapping[str, int]
    rules: Rules
    hardware: str


@dataclass(frozen=True)
class MeshPlan:
    """The resolved placement. `train` is None only where nothing trains: `check(trains=False)`."""

    name: str
    pools: tuple[PoolSettings, ...]
    servers: tuple[ServerPlan, ...]
    train: TrainPlan | None
    roles: tuple[TrainPlan, ...]  # of the pools of kind role
    rules_train: Rules
    rules_serve: Rules
    placed: tuple[tuple[int, ...], ...]  # devices of each pool

    @classmethod
    def from_settings(
        cls, settings: MeshSettings, model: ModelSettings | None = None
    ) -> "MeshPlan":
        """Place the pools. `model` matters only where a pool says `kv_heads: replicate`.

        Never raises for what a user can get wrong: `check` reports it. A rule of the settings
        replaces the default rule of the same logical axis; the other defaults stay.
        """
        rules_train = merge_rules(TRAIN_RULES, settings.rules_train)
        rules_serve = merge_rules(SERVE_RULES, settings.rules_serve)
        placed = _place(settings.pools)
        servers: list[ServerPlan] = []
        trains: list[TrainPlan] = []
        roles: list[TrainPlan] = []
        for pool, devices in zip(settings.pools, placed):
            axes = full_axes(pool.axes)
            if pool.kind in SERVING:
                rules = _replicate_kv(rules_serve, pool, axes, model)
                servers += _servers(pool, devices, axes, rules)
            if pool.kind in ("train", "colocated", "role"):
                # The servers of a colocated pool, side by side, are its train mesh's data axis.
                axes = {**axes, "data": axes["data"] * pool.replicas}
                rules = _replicate_kv(rules_train, pool, axes, model)
                mesh = TrainPlan(pool.name, devices, axes, rules, pool.hardware)
                (roles if pool.kind == "role" else trains).append(mesh)
        return cls(
            name=settings.name,
            pools=settings.pools,
            placed=placed,
            servers=tuple(servers),
            train=trains[0] if trains else None,
            roles=tuple(roles),
            rules_train=rules_train,
            rules_serve=rules_serve,
        )

    @property
    def num_devices(self) -> int:
        """Devices a machine must have: the highest index used, plus one."""
        return max((d for devices in self.placed for d in devices), default=-1) + 1

    def pools_for(self, tag: str) -> tuple[str, ...]:
        """Serving pools for a tag's turns; a colocated pool counts as a decode pool.

        Of prefill and of decode pools each: those that name the tag, else those that name none,
        else all, because affinity is a preference.
        """
        chosen: list[str] = []
        for kinds in (("prefill",), ("decode", "colocated")):
            pools = [pool for pool in self.pools if pool.kind in kinds]
            named = [pool for pool in pools if tag in pool.tags]
            untagged = [pool for pool in pools if not pool.tags]
            chosen += [pool.name for pool in named or untagged or pools]
        return tuple(chosen)

    def role(self, pool: str, model: ModelSettings) -> TrainPlan:
        """Where a role of this model lies: on the pool of kind role, or with "" on the train mesh.

        Raises: KeyError for a pool that is not of kind role.
        """
        assert self.train is not None, "check refuses a plan without a train mesh"
        plan = {"": self.train, **{role.pool: role for role in self.roles}}[pool]
        settings = next(p for p in self.pools if p.name == plan.pool)
        return replace(plan, rules=_replicate_kv(self.rules_train, settings, plan.axes, model))

    def check_role(
        self, pool: str, model: ModelSettings, learner: LearnerSettings, vocab_size: int = 0
    ) -> list[str]:
        """Everything that keeps a role of this model from lying on its pool; as `check`."""
        return mesh_errors(self.role(pool, model), _sizes(model, learner, None, vocab_size))

    def describe(self) -> str:
        """The plan as a table: one line a server, one for the train mesh, then what is special."""
        rows = [("server", "kind", "devices", "axes", "hardware", "tags")]
        for s in self.servers:
            tags = ",".join(s.tags) or "any"
            rows.append((s.name, s.kind, ranges(s.devices), cut(s.axes), s.hardware, tags))
        if (t := self.train) is not None:
            rows.append((t.pool, "train", ranges(t.devices), cut(t.axes), t.hardware, ""))
        rows += [
            (r.pool, "role", ranges(r.devices), cut(r.axes), r.hardware, "") for r in self.roles
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"mesh {self.name}: {self.num_devices} device(s)"]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        lines += [
            f"{s.name}: kv heads are replicated, as its tensor axis does not divide them"
            for s in self.servers
            if dict(s.rules).get("kv_heads") != dict(self.rules_serve).get("kv_heads")
        ]
        return "\n".join(lines)

    def check(
        self,
        model: ModelSettings,
        num_devices: int,
        learner: LearnerSettings | None = None,
        engine: EngineSettings | None = None,
        vocab_size: int = 0,
        trains: bool = True,
    ) -> list[str]:
        """Everything that keeps this plan from running this model on num_devices devices.

        One line each, with the numbers and the remedy. vocab_size is the tokenizer's, used where
        model.vocab_size is 0; with both 0 the vocabulary is not checked. trains: False where the
        plan's servers alone run, which need no train mesh.
        """
        return plan_errors(self, num_devices, _sizes(model, learner, engine, vocab_size), trains)


def _sizes(
    model: ModelSettings,
    learner: LearnerSettings | None,
    engine: EngineSettings | None,
    vocab_size: int,
) -> Sizes:
    return {
        "vocab": ("model.vocab_size", model.vocab_size or vocab_size),
        "embed": ("model.embed_size", model.embed_size),
        "heads": ("model.num_heads", model.num_heads),
        "kv_heads": ("model.num_kv_heads", model.num_kv_heads),
        "head_dim": ("model.head_dim", model.head_dim),
        "mlp": ("model.mlp_size", model.mlp_size),
        "batch": ("learner.microbatch_rows", learner.microbatch_rows if learner else 0),
        "slots": ("engine.slots", engine.slots if engine else 0),
        "pages": ("engine.num_pages", engine.cache_pages if engine else 0),
    }


def _place(pools: Sequence[PoolSettings]) -> tuple[tuple[int, ...], ...]:
    """Devices of each pool: lists as given, counts on the lowest indices nobody has."""
    taken = {d for pool in pools if not isinstance(pool.devices, int) for d in pool.devices}
    placed, next_free = [], 0
    for pool in pools:
        if not isinstance(pool.devices, int):
            placed.append(tuple(pool.devices))
            continue
        mine: list[int] = []
        while len(mine) < min(pool.devices, MAX_DEVICES):
            if next_free not in taken:
                mine.append(next_free)
            next_free += 1
        placed.append(tuple(mine))
    return tuple(placed)


def _servers(
    pool: PoolSettings, devices: tuple[int, ...], axes: Mapping[str, int], rules: Rules
) -> list[ServerPlan]:
    """The pool's replicas on equal runs of its devices; none where they do not share equally."""
    if pool.replicas < 1 or len(devices) % pool.replicas:
        return []
    share = len(devices) // pool.replicas
    return [
        ServerPlan(
            name=f"{pool.name}.{replica}",
            pool=pool.name,
            kind=pool.kind,
            devices=devices[replica * share : (replica + 1) * share],
            axes=axes,
            rules=rules,
            hardware=pool.hardware,
            tags=tuple(pool.tags),
        )
        for replica in range(pool.replicas)
    ]


def _replicate_kv(
    rules: Rules, pool: PoolSettings, axes: Mapping[str, int], model: ModelSettings | None
) -> Rules:
    """The rules without the split of kv heads, where the pool asks for that and it is needed."""
    if pool.kv_heads != "replicate":
        return rules
    assert model is not None, "kv_heads: replicate needs MeshPlan.from_settings(settings, model)"
    split = prod(axes.get(axis, 1) for axis in dict(rules).get("kv_heads", ()))
    if split < 1 or model.num_kv_heads % split == 0:
        return rules
    return merge_rules(rules, {"kv_heads": ()})
