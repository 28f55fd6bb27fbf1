"""Every part's frozen configuration: with settings_watch.py the one place where a default lives. stdlib only.

A field's comment gives its unit and range; validate.check enforces it, config.py builds the instances. No part sees the
whole of `Settings`: each takes its own section.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_jax.settings_watch import GuardSettings, MetricsSettings


@dataclass(frozen=True)
class RopeSettings:
    """How rotary frequencies are stretched for contexts beyond those of pretraining."""

    scaling: str = "none"  # none | linear (arXiv:2306.15595) | llama3 | yarn (arXiv:2309.00071)
    factor: float = 1.0  # by which contexts are longer; at least 1
    original_context: int = 0  # positions of pretraining, which llama3 and yarn need
    # llama3: wavelengths above original_context / low are stretched, below original_context / high are not
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn: turns within original_context, above the first of which nothing is stretched, below the second all
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # yarn: of cosines and sines; 0 = 0.1 ln(factor) + 1


@dataclass(frozen=True)
class ModelSettings:
    family: str = "decoder"  # a name of MODELS, or "package.module:attribute"
    # Hugging Face directory that architecture, tokenizer and first weights come from; "" = none
    source: str = ""
    # a name of TOKENIZERS, a directory with tokenizer.json, or "package.module:attribute"; "" = the source's, or byte
    tokenizer: str = ""
    vocab_size: int = 0  # 0 = the tokenizer's
    num_layers: int = 2
    embed_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    mlp_size: int = 256
    activation: str = "silu"  # of the gate: silu | gelu_tanh
    rope_theta: float = 10_000.0
    rope_theta_local: float = 0.0  # of layers with a window, unscaled; 0 = as the others
    rope: RopeSettings = RopeSettings()
    window: int = 0  # tokens a windowed layer sees back, its own included; 0 = no layer has one
    full_every: int = 0  # layers n, 2n, ... (from 1) see everything; 0 = every layer has the window
    attention_scale: float = 0.0  # of scores; 0 = head_dim ** -0.5
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0 = none
    logit_softcap: float = 0.0  # the same of logits
    norm_eps: float = 1e-6
    norm_offset: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # norms behind attention and mlp too, before the residual sum
    qk_norm: bool = False
    qkv_bias: bool = False
    scale_embed: bool = False  # embeddings times sqrt(embed_size)
    tie_embeddings: bool = True
    max_context: int = 0  # positions the model was trained for, engine.context at most; 0 = unknown
    dtype: str = "float32"  # of activations and served weights: float32 | bfloat16
    param_dtype: str = "float32"  # of the trained master weights


@dataclass(frozen=True)
class PoolSettings:
    name: str = "all"
    # prefill | decode | train | colocated | role (a critic or frozen policies, named by their `pool`)
    kind: str = "colocated"
    devices: int | tuple[int, ...] = 1  # a number (the next free ones) or device indices
    replicas: int = 1  # servers that share the devices equally
    # per server: data, fsdp, tensor, expert, context; absent = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    hardware: str = "cpu"  # hardware class, for affinity
    tags: tuple[str, ...] = ()  # task tags this pool is preferred for; () = any
    kv_heads: str = "error"  # replicate | error where tensor does not divide the kv heads


@dataclass(frozen=True)
class MeshSettings:
    name: str = "one_device"
    pools: tuple[PoolSettings, ...] = (PoolSettings(),)
    # (logical axis, mesh axis or axes)
    rules_train: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    rules_serve: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    # the JAX backend: "" = whatever JAX finds, "cpu" = the CPU with simulated devices, "gpu" = GPUs
    platform: str = ""


@dataclass(frozen=True)
class EngineSettings:
    slots: int = 32  # requests one server generates for at once
    context: int = 256  # most tokens of one history
    page_size: int = 64  # tokens of one page of the KV cache; a shorter context is one page
    num_pages: int = 0  # pages of the KV cache; 0 = as many as all slots take at full context
    steps_per_block: int = 4  # decode steps per dispatch
    # packed prefill / append sizes that are compiled, ascending
    chunk_sizes: tuple[int, ...] = (64, 512)
    chunk_requests: int = 16  # most requests in one chunk
    num_stop_tokens: int = 4  # most stop token ids of one request
    # longest suffix of a live history that its decode server appends itself; longer ones go to a prefill server.
    # 0 = what costs less, by the times that the servers measure
    append_limit: int = 256

    @property
    def page_tokens(self) -> int:
        """page_size, or what stands in its place."""
        return min(self.page_size, self.context)

    @property
    def table_pages(self) -> int:
        """Pages of a history that fills the context."""
        return -(-self.context // self.page_tokens)

    @property
    def cache_pages(self) -> int:
        """num_pages, or what stands in its place."""
        return self.num_pages or self.slots * self.table_pages


@dataclass(frozen=True)
class ServeSettings:
    # requests one server may hold, those that it works on included; one more is refused (TurnError queue_full)
    queue_size: int = 1024
    turn_deadline_s: float = 60.0
    # most chunks in a row that extend histories while others wait to generate: a block costs much the same for few
    # as for many, so a server that fills up, or rebuilds after a swap, fills first
    chunks_per_block: int = 16
    # for every server to compile its programs, then exit code 5; and for one program, then the server counts as dead
    compile_deadline_s: float = 1800.0
    # a server that has work and does none of it for so long counts as dead: its turns go on elsewhere. More than a
    # chunk or a block ever takes, behind a train step where that runs on the same devices
    progress_timeout_s: float = 120.0
    stop_deadline_s: float = 10.0  # for close() to join a server's thread
    # which servers prefill and which decode. fixed: as their pools say | auto: at the start, then by how long prefixes
    # and turns wait; every server compiles what both roles need
    pd_balance: str = "fixed"
    # which pools a tag's episodes prefer. declared: as mesh.pools' tags say | auto: those of the hardware class that
    # lets all tags together take least, by what their turns cost on each (rl_jax/serve/affinity.py)
    affinity: str = "declared"


@dataclass(frozen=True)
class TaskSource:
    tag: str = "frozen_lake"
    env: str = "frozen_lake"  # a name of ENVS, or "package.module:attribute"
    # "env" = sum of the environment's step rewards, a name of REWARDS, or "composite" = weighted sum of the parts
    reward: str = "env"
    # most environments of it that live at once in the whole run; 0 = as many as workers hold
    max_live: int = 0
    # scripted episodes of the warm start, reused in shuffled passes; 0 = none of this tag
    script_episodes: int = 512
    # share of them whose script is the solution, the rest act at random; 0..1
    script_skill: float = 0.6
    config: Mapping[str, Any] = field(default_factory=dict)  # passed to the environment
    parts: Mapping[str, float] = field(default_factory=dict)  # scorer or "env" -> weight
    # scorer -> weight: added to what is trained on; filters, curricula and figures of success never see it
    shaping: Mapping[str, float] = field(default_factory=dict)
    turn_reward: str = ""  # a scorer of turns, asked while the episode goes on; "" = none
    turn_weight: float = 1.0  # of its values, which are added to what is trained on

    @property
    def scorers(self) -> frozenset[str]:
        """Names of all scorers that its episodes need."""
        names = {self.reward, self.turn_reward, *self.parts, *self.shaping}
        return frozenset(names - {"", "env", "composite"})


@dataclass(frozen=True)
class CurriculumSettings:
    """Which tag the next task is of. With one, a batch holds groups of any tags and not equal shares."""

    # none: equal shares of the tags | dump: by the advantages that training made
    name: str = "none"
    window: int = 300  # trained episodes of a tag that count
    tau: float = 0.1  # softmax temperature of the scores; mean |advantages| are its scale
    floor: float = 0.1  # share of the draws that is uniform; 0..1


@dataclass(frozen=True)
class TaskSettings:
    sources: tuple[TaskSource, ...] = (TaskSource(),)
    shuffle: bool = True
    curriculum: CurriculumSettings = CurriculumSettings()


@dataclass(frozen=True)
class RolloutSettings:
    batch_groups: int = 8  # groups a step trains on; tags take equal shares
    group_size: int = 8  # episodes of one task
    # 0 = synchronous; what a step trains is at most this many versions old
    max_staleness: int = 1
    # fixed: max_staleness is the bound | adaptive: 1 to max_staleness, whichever trains the most effective samples a
    # second (rl_jax/rollout/bound.py)
    staleness_policy: str = "fixed"
    # what an age is counted from. oldest: the version of the oldest trained token | start: that at which the episode
    # started, which is the same or older
    age_of: str = "oldest"
    # a name of SCHEDULERS. trajectory: an episode starts as soon as slots and max_staleness allow | batch: no group
    # starts before the batch before is complete
    scheduler: str = "trajectory"
    # when an episode's next turn begins. trajectory: at once | batch: when all live episodes have ended theirs
    env_stepping: str = "trajectory"
    # an episode in flight when weights are published goes on under the newer ones; False: it begins anew
    partial_rollouts: bool = True
    # redundancy: so many groups, and members of each group, run beyond those that are needed; the first to finish are
    # kept, and the rest is cancelled when the quota is met
    extra_groups: int = 0  # of all tags together
    extra_members: int = 0
    temperature: float = 1.0
    top_p: float = 1.0  # of the top_k likeliest; in training, below 1 needs top_k
    # 0 = all. In training at most 64: the ids a token was sampled from are kept, and the log-probs are taken over them
    top_k: int = 0
    max_new_tokens: int = 16  # per turn
    max_turns: int = 0  # 0 = the task's own limit
    # how calls of tools are written: auto (as the tokenizer's chat template), or a name of TOOL_PARSERS
    tool_parser: str = "auto"
    # where a chat template shows another history than was seen (it drops earlier thoughts): keep = go on with what was
    # seen | template = begin a new context as it says, trained apart; all contexts of an episode fit learner.row_tokens
    history: str = "keep"
    env_workers: int = 1  # environment worker processes
    envs_per_worker: int = 256  # most live environments in one worker process
    reset_timeout_s: float = 20.0
    step_timeout_s: float = 10.0
    start_timeout_s: float = 60.0  # import of the environment's module in a worker
    episode_timeout_s: float = 300.0
    max_obs_bytes: int = 65_536  # a longer observation is cut, marked and counted
    # what becomes of a group that loses a member. replace: the episode is played again, and the group waits for it |
    # survivors: the group goes on smaller | drop: the group goes, and another task takes its place
    short_group_infra: str = "replace"  # a member failed through no fault of the policy
    short_group_stale: str = "drop"  # a member is older than max_staleness
    max_attempts: int = 3  # tries of one episode before its group is dropped
    # infra failures of environments in a row before the run stops (exit code 4)
    max_env_failures: int = 64
    take_timeout_s: float = 600.0  # longest wait for a batch without any episode progress
    # batches of groups that algorithm.filter may drop of a tag for one step; then the run saves and stops (exit code 6)
    max_filtered_batches: int = 20
    replay_dir: str = ""  # train_only: a run directory whose rollouts/step_N/train are trained on


@dataclass(frozen=True)
class RewardSettings:
    """Where scorers run: in worker processes of the run, or of a service (docs/rewards.md)."""

    timeout_s: float = 10.0  # of one call of a scorer, from when a worker takes it
    workers: int = 1  # processes, at most; not read where there is a url
    # 0: all workers stay | else they are started for calls that find none free, and end after so long without one
    keep_alive_s: float = 0.0
    # a call may take min(max(2 s, 1.5 times the slowest answer above 0 of its task so far), timeout_s), and timeout_s
    # while there is none
    adaptive_timeout: bool = False
    # keyword arguments of a scorer's constructor, by its name; not read where there is a url: its service has them
    options: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""  # of a reward service; "" = processes of the run
    token_file: str = ""  # a file whose one line is the service's token; "" = none
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 10.0  # for the service's answer beyond what its scorer may take
    total_timeout_s: float = 120.0  # of a call with all its retries
    retries: int = 5  # of one call, with random pauses that double; Retry-After is honoured
    retry_budget: int = 256  # retries that all calls share; each answer fills it by one
    connections: int = 64  # calls at once; the others wait


@dataclass(frozen=True)
class CorrectionSettings:
    """Proximal policy (algorithm.old_policy) over the one that sampled; every bound is on that ratio. None = the
    algorithm's own."""

    level: str | None = None  # of importance weights: none | token | segment | geometric | sequence
    mode: str | None = None  # truncate: into [low, high] | mask: 0 outside
    low: float | None = None
    high: float | None = None
    # none | ratio (in [reject_low, reject_high]) | k2 | k3 (at most high)
    reject_stat: str = "none"
    reject_level: str = "token"  # token | segment | seq_sum | seq_mean | seq_max
    reject_low: float = 0.0
    reject_high: float = 2.0
    veto: float = 0.0  # a token's ratio below it removes its sequence; 0 = off
    # mean log-ratio by which a sequence with a negative advantage may have drifted; 0 = off
    opsm_delta: float = 0.0
    max_token_age: int = 0  # tokens more versions older than the step have no loss; 0 = off
    # trained tokens that the aggregation counts: before_filter (all) | after_filter (those that are not dropped here)
    denominator: str = "before_filter"
    # mean squared log-ratio that is left when M2PO has dropped the tokens farthest off; 0 = off
    m2po: float = 0.0
    batch_normalize: bool = False  # importance weights over their mean in the batch


@dataclass(frozen=True)
class KlSettings:
    """To a frozen reference policy."""

    coef: float = 0.0  # 0 = off, and no reference in memory
    where: str = "loss"  # loss | reward
    # k1 | k2 | k3 | k3+ | abs | unbiased; None = k1 in the reward, k3 in the loss
    kind: str | None = None
    target: float = 0.0  # in nats a sequence, adapts coef (in the reward only); 0 = fixed
    horizon: int = 10_000  # samples over which it adapts


@dataclass(frozen=True)
class EntropySettings:
    """The coefficient of the entropy bonus holds the entropy at a target: entropy_coef is where it starts."""

    target: float = 0.0  # nats a token, at the sampling temperature; 0 = the coefficient is fixed
    # what a step adds to the coefficient at or below the target, and takes from it above, where no bonus is paid
    delta: float = 0.005
    low: float = 0.0  # bounds of the coefficient
    high: float = 1.0


@dataclass(frozen=True)
class OverlongSettings:
    """Penalty that grows over the last `buffer` of `max_tokens` sampled tokens, to `factor`."""

    buffer: int = 0  # 0 = off
    max_tokens: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class FilterSettings:
    """Groups that are not trained on, by their task rewards, and are replaced."""

    equal_rewards: bool = False  # all equal, or fewer than two (dynamic sampling)
    mean_above: float | None = None  # keep mean reward above it, exclusive
    mean_below: float | None = None
    # Rejection sampling: other members train nothing, but their rewards stay in the group's statistics.
    # Train members of at least min_reward; a group without one is dropped.
    min_reward: float | None = None
    best_of: int = 0  # train the best so many of each group; 0 = all


@dataclass(frozen=True)
class AlgorithmSettings:
    """None = the algorithm's own value, of its entry in ALGORITHMS; a key that is not in the entry is not read."""

    name: str = "grpo"  # a name of ALGORITHMS
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None  # bound of the loss where the advantage is negative; 0 = off
    # token-mean | token-sum | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm |
    # group-mean-token-mean
    aggregation: str | None = None
    # what a ratio is taken against. behaviour: the policy that sampled | recompute: the trainer's at step start |
    # one_update: the same without a forward, ratio 1 | loglinear: between both by age
    old_policy: str | None = None
    gamma: float | None = None  # discount of a token's or a turn's reward
    lam: float | None = None  # of GAE
    # ppo: the value after the last token of an episode that a limit cut is its last token's; else 0
    bootstrap: bool | None = None
    critic_lam: float | None = None  # ppo: lam of the critic's own targets; none = lam
    # ppo: lam of a sequence of n trained tokens is 1 - 1 / (lam_alpha n), for the advantages; 0 = lam
    lam_alpha: float | None = None
    nll_coef: float | None = None  # ppo: of -log p on the tokens of successes; 0 = off
    omega: float | None = None  # weight of gigpo's step term
    ratio_min: float | None = None  # bounds of a detached weight
    ratio_max: float | None = None
    tau: float | None = None  # kimi: pull to the old policy
    tau_pos: float | None = None  # sapo: steepness of the gate by the advantage's sign
    tau_neg: float | None = None
    divergence: str | None = None  # dppo: tv | kl
    div_low: float | None = None
    div_high: float | None = None
    weight_level: str | None = None  # topr: sequence | token
    preference: str | None = None  # dpo: sigmoid | ipo
    beta: float | None = None
    jsd_beta: float | None = None  # distill: 0 forward KL, 1 reverse KL, between both their mixture
    label_smoothing: float | None = None
    center_coef: float | None = None  # rm: weight of (sum of a pair's rewards)^2; 0 = off
    cov_share: float | None = None  # kl_cov, clip_cov: of the step's tokens
    cov_coef: float | None = None  # kl_cov: of the pull
    cov_low: float | None = None  # clip_cov: the band of covariances that it draws from
    cov_high: float | None = None
    episode_roles: tuple[str, ...] | None = None  # role_groups: compared by turn, within an episode
    decay: float | None = None  # role_ema: of a role's running baseline, a reward
    # gdpo: part of the reward -> its weight; none named = the reward as a whole
    reward_weights: Mapping[str, float] | None = None
    reward_coef: float | None = None  # opd_mixed: of the reward's advantage
    teacher_coef: float | None = None  # opd_mixed: of the teacher's; 0 = off, and none in memory
    # weight of the reward model's score of an episode, beside the task's reward; 0 = off, and none in memory
    reward_model_coef: float = 0.0
    reward_model_at: str = "end"  # end | turns: read at the end of the episode, or of each turn
    advantage_clip: float = 0.0  # largest absolute advantage; 0 = no bound
    positive_weight: float = 1.0  # factor of advantages above 0, after the clip
    negative_weight: float = 1.0  # of those below 0
    entropy_coef: float = 0.0
    max_response_tokens: int = 0  # the constant L of seq-mean-token-sum-norm; 0 = engine.context
    overlong_filter: bool = False  # truncated trajectories get an empty loss mask
    # by what a reward's distance from its group's mean is divided: std of the group | of the batch | none
    std_scope: str | None = None
    std_eps: float | None = None  # added to that std
    normalize: bool | None = (
        None  # rloo, aipo: by the batch's mean and std; grpo_passk: by the group's std
    )
    correction: CorrectionSettings = CorrectionSettings()
    kl: KlSettings = KlSettings()
    entropy: EntropySettings = EntropySettings()
    overlong: OverlongSettings = OverlongSettings()
    filter: FilterSettings = FilterSettings()


@dataclass(frozen=True)
class DataSettings:
    """Rows that an algorithm of rows (sft, dpo, rm) trains on, without servers or rollout."""

    path: str = ""  # JSON lines; a pattern with * for several files; "" = sft: the sources' scripts
    eval_path: str = ""  # held-out rows, evaluated as eval.every says
    eval_share: float = 0.0  # or this share of path's rows, drawn by the seed; [0, 1)
    batch_rows: int = 32  # rows of a step; a pair is one row
    epochs: int = 0  # passes over the rows, in place of `steps`; 0 = as many as `steps` take
    shuffle: bool = True
    train_on: str = "all"  # all | last: which assistant turns of a row
    too_long: str = "drop"  # drop | truncate | error: rows longer than learner.row_tokens
    deadline_s: float = 600.0  # longest wait for one batch of rows


@dataclass(frozen=True)
class WarmStartSettings:
    """Supervised steps on scripted episodes before RL. A section of its own: it has its own data, rate and length."""

    steps: int = 0  # 0 = none
    batch_episodes: int = 64
    learning_rate: float = 2e-3


@dataclass(frozen=True)
class LearnerSettings:
    learning_rate: float = 1e-3
    schedule: str = "constant"  # constant | linear | cosine (over `steps`, to 0)
    warmup_steps: int = 0
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # global norm
    row_tokens: int = 256  # T of a packed row; at least engine.context
    microbatch_rows: int = 8  # rows of one microbatch, over all devices; divisible by data x fsdp
    remat: str = "none"  # none | elementwise | layer: what backward computes again (Model.hidden)
    attention: str = (
        "auto"  # auto | plain | cudnn | splash; auto takes the device's kernel, if one fits
    )
    logprob_chunk: int = 1024  # positions whose [*, V] logits are live at once
    max_skipped: int = 5  # non-finite updates in a row before the run stops (exit code 6)


@dataclass(frozen=True)
class CriticSettings:
    """The value model of an algorithm that needs values. Rows, moments and limits are LearnerSettings'."""

    learning_rate: float = 2e-3
    schedule: str = "constant"  # as learner.schedule
    warmup_steps: int = 0  # of the learning rate
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    updates: int = 2  # on each batch, towards the same returns
    # how far they may move a value from that at step start; 0 = free. With one update nothing has moved yet
    value_clip: float = 0.2
    head_start: int = 0  # first steps that train the critic alone; the policy stands still
    pool: str = ""  # the mesh pool of kind role that holds it; "" = the train mesh


@dataclass(frozen=True)
class FrozenSettings:
    """A model that scores and is not trained, a policy or (reward_model) what algorithm rm trained; it is held only
    where the algorithm reads what it says."""

    # a run directory (its last checkpoint) or a checkpoints/step_N; its model is what its config.json says.
    # reference: "" = the policy that RL starts from
    checkpoint: str = ""
    pool: str = ""  # the mesh pool of kind role that holds it; "" = the train mesh


@dataclass(frozen=True)
class WeightSettings:
    kv: str = "recompute"  # recompute | keep: KV of live histories at a swap
    # To servers of the driver's process. packed: each device packs what each other one needs, without a collective |
    # reshard: a collective on the train mesh lays a bucket out as its targets do, then shards are copied.
    # To servers of other processes. shared: through memory, on the driver's host | store: once to a process of their
    # host (cluster.stores), then through memory | channel: to each through its socket | transfer: to each by
    # jax.experimental.transfer. auto: packed; and the first of shared, store and channel by which a server is reached.
    transport: str = "auto"
    bucket_bytes: int = (
        1 << 30
    )  # smaller ones lose to the host's work a bucket (benchmarks/README.md)
    deadline_s: float = 60.0
    retries: int = 3  # of a sync that ends ABORTED; then exit code 5
    max_failures: int = 3  # syncs in a row that a server fails: then it is removed from the run


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 0  # steps; 0 = only at the end
    keep: int = 2  # newest steps that are kept; at least 1
    deadline_s: float = 600.0  # longest wait for one save to reach the disk


@dataclass(frozen=True)
class EvalSettings:
    every: int = 0  # steps; 0 = only before the first and after the last step
    episodes: int = 64  # per tag
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    timeout_s: float = 300.0


@dataclass(frozen=True)
class ClusterSettings:
    # Where the servers run. inproc: threads of the driver's process | local: processes that it starts on its host |
    # external: processes that somebody else starts, by commands that the driver prints | ray: processes on the nodes of
    # a Ray cluster (extra ray)
    backend: str = "inproc"
    # of the Ray cluster; "" = one of this host alone, started and ended with the run
    address: str = ""
    # Of a Ray that the run starts itself: in a network namespace of its own, where nobody else reaches it, and the run
    # nobody else. False: it listens on every address of this host, to whoever can reach those
    private_network: bool = True
    # of external and ray
    host: str = "127.0.0.1"  # the driver's own address on which it listens, and which the processes connect to
    port: int = 0  # 0 = any that is free
    # of all but inproc
    heartbeat_s: float = 1.0  # between two signs of life of one process to another
    lease_s: float = 15.0  # without a sign of life, until a process is dead and is started again
    # for a process to come, and again to import JAX and build its engine
    start_timeout_s: float = 120.0
    restarts: int = 3  # of the process of one server that has served; then the server stays away
    # of all but inproc: processes, one a host, that take weights once for all servers there
    stores: int = 0
    # Of external and ray, workers of environments and scorers. cluster: started as servers are | driver: on its host
    workers: str = "cluster"
    env_hardware: str = "cpu"  # of ray: the class of node that environments' workers go to
    scorer_hardware: str = "cpu"  # and scorers' workers
    # Where the policy trains. 0: in the driver's process | n: in n processes, each with as many of the train mesh's
    # devices; with the backends external and ray they are started as the servers are, else on the driver's host
    learner_processes: int = 0
    learner_deadline_s: float = 1800.0  # for one order to them, its compile included
    learner_journal_bytes: int = (
        1
        << 30  # of batches since the last save, kept to repeat them after a loss; then it is saved
    )

    @property
    def moves_workers(self) -> bool:
        """Whether a run with servers has its workers where the cluster puts them."""
        return self.backend in ("external", "ray") and self.workers == "cluster"


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    run_id: str = ""  # "" = made at the first start and stored in the run directory
    steps: int = 100
    model: ModelSettings = ModelSettings()
    mesh: MeshSettings = MeshSettings()
    engine: EngineSettings = EngineSettings()
    serve: ServeSettings = ServeSettings()
    tasks: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    rewards: RewardSettings = RewardSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    data: DataSettings = DataSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    learner: LearnerSettings = LearnerSettings()
    critic: CriticSettings = CriticSettings()
    reference: FrozenSettings = FrozenSettings()
    teacher: FrozenSettings = FrozenSettings()
    reward_model: FrozenSettings = FrozenSettings()
    weights: WeightSettings = WeightSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    metrics: MetricsSettings = MetricsSettings()
    cluster: ClusterSettings = ClusterSettings()
    guards: GuardSettings = GuardSettings()
