"""config.py, overrides.py, schema.py, validate.py: one line for each thing that is wrong, all at once, without jax."""

import json
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax import schema
from rl_jax.algorithms.options import resolved
from rl_jax.config import ConfigError, default_config, parse, resolved_json, resolved_python
from rl_jax.resume import RunDirError, decide
from rl_jax.run_dir import RunDir
from rl_jax.settings import MeshSettings, PoolSettings, RolloutSettings, Settings, TaskSource
from rl_jax.validate import check

ROOT = Path(__file__).resolve().parents[1]


def errors_of(*argv):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return list(caught.value.errors)


def config_file(tmp_path, body, name="experiment.py"):
    """A config file whose get_config has this body."""
    head = "from ml_collections import ConfigDict\nfrom ml_collections.config_dict import required_placeholder\n"
    head += "from rl_jax.config import default_config\nfrom rl_jax.overrides import REQUIRED\n\n"
    path = tmp_path / name
    path.write_text(head + textwrap.dedent(body))
    return f"--config={path}"


ONE_DEVICE = """
    def get_config():
        config = default_config()
        {}
        return config
"""


TWO_TASKS = """
    from mesh_configs import split_8

    def get_config():
        config = default_config()
        config.mesh = split_8.get_config()
        config.tasks.sources = [ConfigDict({"tag": "frozen_lake"}), ConfigDict({"tag": "chain_sum"})]
        return config
"""  # the words below are meant for this one, whatever values the quickstart is tuned to


@pytest.fixture
def two_tasks(tmp_path):
    return config_file(tmp_path, TWO_TASKS, "two_tasks.py")


# --- every bad config raises its line ------------------------------------------------------------------------------

BAD = [
    # spelling and shape of the command line
    ("--config.learner.learning_rat=1", "learner.learning_rat is not a key; did you mean learner.learning_rate"),
    ("--config.learning_rate=1", "learning_rate is not a key; did you mean critic.learning_rate, learner."),
    ("--config.lerner.remat=1", "lerner is not a key; did you mean learner"),
    ("--confg.steps=3", "unknown flag --confg.steps; did you mean --config.steps=3?"),
    ("--steps=3", "unknown flag --steps; did you mean --config.steps=3, --config.warm_start.steps=3?"),
    ("--moed=eval", "unknown flag --moed; did you mean --mode=eval?"),
    ("steps=3", "stray word 'steps=3'; did you mean --config.steps=3?"),
    ("train", "stray word 'train'"),
    ("--mode=serve", "--mode=serve is not one of train, eval, rollout_only, train_only"),
    ("--resume=yes", "--resume=yes is neither auto, never, strict, a step, nor a directory"),
    ("--mesh=none", "no config file none; mesh_configs holds: colocated_8, gpu_2, h100_8, one_device, split_2, split_"),
    ("--config.learner=3", "--config.learner is a section; set one of its keys: learning_rate"),
    ("--config.tasks.sources=3", "--config.tasks.sources is a section"),
    ("--config.tasks.sources.tag=x", "tasks.sources is a list; write --config.tasks.sources[0].tag"),
    ("--config.tasks.sources[9].tag=x", "tasks.sources has 2 elements, counted from 0"),
    ("--config.steps.a=3", "--config.steps.a: steps is a value, not a section"),
    ("--config.engine.chunk_sizes[0]=3", "engine.chunk_sizes is set whole: --config.engine.chunk_sizes=a,b"),
    ("--config.steps", "--config.steps needs a value: --config.steps=..."),
    ("--progress=fancy", "metrics.progress=fancy is not one of auto, rich, plain, json, none"),
    # type and range
    ("--config.steps=2.5", "steps=2.5 must be an int"),
    ("--config.steps=1e3", "steps=1000.0 must be an int; write 1000"),
    ("--config.steps=-5", "steps=-5 must be at least 0"),
    ("--config.steps=True", "steps=True must be an int"),
    ("--config.learner.learning_rate=nan", "learner.learning_rate=nan must be a finite number"),
    ("--config.learner.learning_rate=inf", "learner.learning_rate=inf must be a finite number"),
    ("--config.learner.learning_rate=fast", "learner.learning_rate='fast' must be a float"),
    ("--config.learner.learning_rate=0", "learner.learning_rate=0.0 must be above 0"),
    ("--config.model.qk_norm=2", "model.qk_norm=2 must be true or false"),
    ("--config.tasks.sources[0].script_skill=1.5", "tasks.sources[0].script_skill=1.5 must be in [0, 1]"),
    ("--config.serve.queue_size=0", "serve.queue_size=0 must be at least 1"),
    ("--config.seed=9999999999999999999", "seed=9999999999999999999 must be in [0, 9223372036854775807]"),
    ("--config.run_id=a/b", "run_id='a/b' must be letters, digits"),
    # names
    ("--config.algorithm.name=gropo", "algorithm.name=gropo is unknown; use grpo"),
    ("--config.algorithm.name=GRPO", 'algorithm.name=GRPO is unknown; use grpo, or "package.module:attribute"'),
    ("--config.algorithm.name=Dr_GROP", "algorithm.name=Dr_GROP is unknown; use dr_grpo"),
    ("--config.model.tokenizer=Byte", "model.tokenizer=Byte is unknown; use byte, or"),
    ("--config.tasks.sources[0].env=FrozenLake", "tasks.sources[0].env=FrozenLake is unknown; use frozen_lake"),
    ("--config.tasks.sources[0].reward=Exact_Match", "reward=Exact_Match is unknown; use exact_match, or"),
    ("--config.learner.LEARNING_RATE=1", "learner.LEARNING_RATE is not a key; did you mean learner.learning_rate"),
    ("--config.model.family=mamba", "model.family=mamba is unknown; use decoder"),
    ("--config.model.tokenizer=bpe", "model.tokenizer=bpe is unknown; use byte"),
    ("--config.rollout.scheduler=lifo", "rollout.scheduler=lifo is unknown; use batch, trajectory"),
    ("--config.tasks.sources[0].env=frozenlake", "tasks.sources[0].env=frozenlake is unknown; use frozen_lake"),
    ("--config.tasks.sources[0].reward=exact", "tasks.sources[0].reward=exact is unknown; use exact_match, "),
    ("--config.algorithm.name=my.module:", 'is not of the form "package.module:attribute"'),
    ("--config.algorithm.name=no_such_pkg.m:C", "there is no package no_such_pkg"),
    ("--config.model.tokenizer=tests", "model.tokenizer=tests is a directory without tokenizer.json"),
    ("--config.model.activation=relu", "model.activation=relu is not one of silu, gelu_tanh"),
    ("--config.model.window=-1", "model.window=-1 must be at least 0"),
    ("--config.model.full_every=2", "model.full_every=2 is of models with windowed layers, but model.window=0"),
    ("--config.model.rope_theta_local=1e4", "model.rope_theta_local=10000.0 is of models with windowed layers"),
    ("--config.model.rope.scaling=dynamic", "model.rope.scaling=dynamic is not one of none, linear, llama3, yarn"),
    ("--config.model.rope.factor=2", "model.rope.factor=2.0 is not read by model.rope.scaling=none"),
    ("--config.model.rope.factor=0.5", "model.rope.factor=0.5 must be at least 1"),
    ("--config.model.rope.scaling=yarn", "model.rope.original_context=0 must be the positions of pretraining"),
    ("--config.model.max_context=100", "engine.context=256 is above model.max_context=100"),
    ("--config.model.dtype=fp8", "model.dtype=fp8 is not one of float32, bfloat16"),
    ("--config.weights.kv=drop", "weights.kv=drop is not one of recompute, keep"),
    (
        "--config.rollout.staleness_policy=auto",
        "rollout.staleness_policy=auto is not one of fixed, adaptive",
    ),
    ("--config.serve.pd_balance=off", "serve.pd_balance=off is not one of fixed, auto"),
    ("--config.cluster.backend=mpi", "cluster.backend=mpi is not one of inproc, local, external, ray"),
    ("--config.rollout.short_group_stale=x", "rollout.short_group_stale=x is not one of replace, survivors, drop"),
    # together
    ("--config.tasks.sources[1].tag=frozen_lake", "tasks.sources[1].tag=frozen_lake is also the tag of another"),
    ("--config.rollout.top_p=0.9", "set rollout.top_k to 2..64 beside it, or top_p to 1.0"),
    ("--config.rollout.top_k=65", "rollout.top_k=65 is above 64"),
    ("--config.rollout.top_k=1", "rollout.top_k=1 is greedy"),
    ("--config.rollout.temperature=0", "rollout.temperature=0 is greedy"),
    ("--config.rollout.group_size=1", "rollout.group_size=1: grpo compares the episodes of one task"),
    ("--config.tasks.curriculum.tau=0.5", "has no effect while tasks.curriculum.name is none"),
    ("--config.tasks.curriculum.name=ucb", "tasks.curriculum.name=ucb is not one of none, dump"),
    ("--config.rollout.batch_groups=7", "rollout.batch_groups=7 does not divide into 2 tags"),
    ("--config.rollout.max_new_tokens=100000", "leaves no room for a prompt in engine.context="),
    ("--config.learner.row_tokens=8", "learner.row_tokens=8 is below engine.context="),
    ("--config.engine.chunk_sizes=512,64", "engine.chunk_sizes=(512, 64) must be positive and ascending"),
    ("--config.model.num_kv_heads=3", "model.num_kv_heads=3 does not divide num_heads=4; use one of [1, 2, 4]"),
    ("--config.model.head_dim=7", "model.head_dim=7 is odd"),
    ("--config.algorithm.max_response_tokens=64", "is read only by aggregation seq-mean-token-sum-norm"),
    ("--config.algorithm.tau_pos=2", "algorithm.tau_pos=2.0 is not read by grpo but by sapo"),
    ("--config.algorithm.name=opd", "algorithm.name=opd needs a teacher; set teacher.checkpoint"),
    ("--config.teacher.checkpoint=x", "teacher.checkpoint=x is not read: no option of algorithm grpo needs a teacher"),
    ("--config.reference.pool=x", "is not read: no option of algorithm grpo needs a reference (algorithm.kl.coef"),
    ("--config.critic.value_clip=0.5", "no option of algorithm grpo needs a critic (ppo does); leave it out"),
    ("--config.critic.learning_rate=0", "critic.learning_rate=0.0 must be above 0"),
    ("--config.algorithm.kl.kind=k2", "has no effect while kl.coef is 0"),
    ("--config.algorithm.correction.level=token", "set algorithm.old_policy to one_update or recompute"),
    ("--config.algorithm.correction.veto=2", "algorithm.correction.veto=2.0 must be in [0, 1]"),
    ("--config.algorithm.correction.reject_high=3", "is read only with reject_stat"),
    ("--config.algorithm.dual_clip=0.5", "must be above 1, or 0 for none"),
    ("--config.algorithm.overlong.buffer=8", "below overlong.max_tokens=0"),
    ("--config.algorithm.old_policy=new", "is not one of behaviour, recompute, one_update, loglinear"),
    ("--config.rollout.replay_dir=x", "is read only by --mode=train_only, not by --mode=train"),
    ("--mode=train_only", "rollout.replay_dir is empty"),
    ("--config.cluster.address=h:1", "cluster.address=h:1 is not used by backend inproc"),
    ("--config.weights.transport=rdma", "is not one of auto, packed, reshard, shared, store, channel, transfer"),
    ("--config.weights.transport=shared", "weights.transport=shared is to servers of other processes, and cluster"),
    ("--config.cluster.stores=1", "cluster.stores=1 is not used by backend inproc; leave it 0"),
    ("--config.rollout.extra_groups=1000", "of which rollout.env_workers x envs_per_worker=256 live at once"),
    ("--config.mesh.pools[0].tags=chess", "mesh.pools[0].tags has 'chess', which no task source has"),
    ("--config.learner.warmup_steps=999", "learner.warmup_steps=999 is beyond steps="),
    # meshes
    ("--config.mesh.pools[0].kind=trian", "kind='trian' is unknown; use one of prefill, decode, train, colocated"),
    ("--config.mesh.pools[0].devices=3", "2 replica(s) x axes"),
    ("--config.mesh.pools[1].axes.tensor=3", "need 6 device(s) but it has 2"),
    ("--mesh=split_8:train3", "cannot train on '3' devices"),
]  # fmt: skip


@pytest.mark.parametrize("word, line", BAD, ids=[word for word, _ in BAD])
def test_bad_config_raises_its_line(two_tasks, word, line):
    errors = errors_of(two_tasks, word)
    assert any(line in error for error in errors), errors
    assert all("\n" not in error for error in errors)
    assert len(errors) <= (4 if word.startswith("--config.mesh") else 2), errors


def test_config_file_that_is_not_there_is_told_with_those_that_are():
    folder = Path(__file__).parents[1] / "rl_jax/configs"
    names = sorted(path.stem for path in folder.glob("*.py"))
    assert "quickstart" in names
    told = f"no config file none.py; configs holds: {', '.join(names)}"
    assert errors_of("--config=none.py") == [told]


def test_all_errors_at_once_and_each_once(two_tasks):
    errors = errors_of(
        two_tasks,
        "--config.learner.learning_rat=1", "--config.engine.slots=-5", "steps=3", "--config.steps=nan",
        "--config.rollout.batch_groups=7", "--config.rollout.batch_groups=9", "--config.algorithm.name=x",
    )  # fmt: skip
    starts = [error.split("=")[0].split(" ")[0] for error in errors]
    assert sorted(starts) == sorted(
        [
            "stray",
            "learner.learning_rat",
            "steps",
            "engine.slots",
            "algorithm.name",
            "rollout.batch_groups",
        ]
    )


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_unknown_key_answers_in_a_second_without_jax():
    code = (
        "import sys; from rl_jax import config\n"
        "try: config.parse(['--config.learner.learning_rat=1'])\n"
        "except config.ConfigError as e: print(e)\n"
        "print([m for m in ('jax', 'flax', 'grain', 'orbax', 'gymnasium') if m in sys.modules])"
    )
    before = children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines() == [
        "learner.learning_rat is not a key; did you mean learner.learning_rate, critic.learning_rate,"
        " warm_start.learning_rate?",
        "[]",
    ]
    # Of CPU, which a busy machine does not stretch as it does the clock; about 0.6 s.
    assert children_cpu_s() - before < 1.5


@pytest.mark.parametrize(
    "words, line",
    [
        (["--config.steps=3", "--config.steps", "4"], "steps=3 and steps=4 are both on the command line; keep one"),
        (["--config.steps=3", "--config.seed=1", "--config.steps=5"], "steps=3 and steps=5 are both"),
        (["--progress=json", "--config.metrics.progress=none"], "metrics.progress=none and metrics.progress=json are"),
        (["--config.model.qk_norm", "--config.model.qk_norm=false"], "model.qk_norm=true and model.qk_norm=false are"),
        (
            ["--config.tasks.sources[0].config.a=1", "--config.tasks.sources[0].config.a=b"],
            "tasks.sources[0].config.a=1 and tasks.sources[0].config.a=b are both",
        ),
        (["--mode=eval", "--mode", "train"], "--mode=eval and --mode=train are both there; keep one"),
        (["--run_dir=a", "--run-dir=b"], "--run_dir=a and --run_dir=b are both there; keep one"),
        (["--dry_run", "--dry_run=false"], "--dry_run=true and --dry_run=false are both there; keep one"),
        (["--mesh=split_8", "--mesh=one_device"], "--mesh=split_8 and --mesh=one_device are both there"),
    ],
)  # fmt: skip
def test_two_values_of_one_flag_are_one_line_with_both(two_tasks, words, line):
    errors = errors_of(two_tasks, *words)
    assert len(errors) == 1 and errors[0].startswith(line), errors


def test_a_flag_may_stand_twice_with_one_value(two_tasks):
    words = ["--config.steps=3", "--config.steps=3", "--config.learner.learning_rate=1e-3"]
    again = ["--config.learner.learning_rate=0.001", "--mode=train", "--mode=train"]
    assert parse([two_tasks, *words, *again]).settings.steps == 3


@pytest.mark.parametrize(
    "words, line",
    [
        (
            ["--config.warm_start.steps=5", "--config.warm_start.batch_episodes=1025"],
            "warm_start.batch_episodes=1025 is more than the 1024 scripted episodes of all task sources",
        ),
        (
            [
                "--config.learner.schedule=cosine",
                "--config.learner.warmup_steps=7",
                "--config.steps=7",
            ],
            "learner.warmup_steps=7 leaves nothing of steps=7 for learner.schedule=cosine",
        ),
        (
            ["--config.tasks.curriculum.name=dump", "--config.algorithm.filter.equal_rewards=true"],
            "tasks.curriculum.name=dump learns from what is trained, so groups that algorithm.filter drops teach it",
        ),
        (
            ["--config.serve.pd_balance=auto", "--mesh=one_device"],
            "serve.pd_balance=auto has no server to move on mesh one_device, which has 1: one prefills and one decodes",
        ),
        (
            ["--config.serve.pd_balance=auto", "--mesh=split_2"],
            "serve.pd_balance=auto has no server to move on mesh split_2",
        ),
        (
            ["--config.algorithm.name=kl_cov", "--config.rollout.max_staleness=0"],
            "algorithm.name=kl_cov pulls tokens back to the policy that sampled, which at rollout.max_staleness=0",
        ),
    ],
)
def test_words_that_cannot_work_together_are_one_line(two_tasks, words, line):
    errors = errors_of(two_tasks, *words)
    assert len(errors) == 1 and errors[0].startswith(line), errors


# --- what is accepted ----------------------------------------------------------------------------------------------


def test_a_batch_need_not_divide_into_tags_under_a_curriculum(two_tasks):
    words = ["--config.tasks.curriculum.name=dump", "--config.rollout.batch_groups=7"]
    assert parse([two_tasks, *words]).settings.rollout.batch_groups == 7


def test_no_words_is_the_quickstart():
    parsed = parse([])
    assert parsed.options.mode == "train" and parsed.options.resume == "auto"
    assert [s.tag for s in parsed.settings.tasks.sources] == ["frozen_lake", "chain_sum"]
    assert check(parsed.settings) == []


def test_order_of_words_does_not_matter(tmp_path):
    file = config_file(tmp_path, ONE_DEVICE.format("config.steps = 7"))
    for words in (
        [file, "--config.seed=3"],
        ["--config.seed=3", file],
        ["--config.seed", "3", file],
    ):
        settings = parse(words).settings
        assert (settings.steps, settings.seed) == (7, 3)


def test_flags_of_launch():
    options = parse(["--dry-run", "--run-dir", "runs/x", "--resume=7", "--mode=eval"]).options
    assert (options.dry_run, options.run_dir, options.resume, options.mode) == (
        True,
        "runs/x",
        "7",
        "eval",
    )
    assert parse(["--dry_run=false", "--progress=json"]).settings.metrics.progress == "json"


def test_help_prints_the_usage_and_exits_zero(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    assert "--config.a.b=value" in capsys.readouterr().out


def test_override_reaches_free_mappings_lists_and_tuples(two_tasks):
    settings = parse([
        two_tasks,
        "--config.tasks.sources[0].config.num_maps=32", "--config.engine.chunk_sizes=32,128", "--config.model.qk_norm",
        "--config.learner.learning_rate=1", "--config.mesh.pools[0].devices=(0,1)",
        "--config.mesh.pools[1].tags=chain_sum",
        "--config.tasks.sources[1].config.extra={'a': [1, 2]}", "--config.algorithm.overlong_filter=true",
    ]).settings  # fmt: skip
    assert settings.tasks.sources[0].config["num_maps"] == 32
    assert settings.tasks.sources[1].config["extra"] == {"a": (1, 2)}
    assert settings.engine.chunk_sizes == (32, 128)
    assert settings.model.qk_norm is True and settings.algorithm.overlong_filter is True
    assert settings.learner.learning_rate == 1.0 and isinstance(
        settings.learner.learning_rate, float
    )
    assert settings.mesh.pools[0].devices == (0, 1) and settings.mesh.pools[1].tags == (
        "chain_sum",
    )


def test_references_follow_an_override(tmp_path):
    file = config_file(
        tmp_path,
        ONE_DEVICE.format("config.steps = 10; config.eval.every = config.get_ref('steps') // 2"),
    )
    assert parse([file]).settings.eval.every == 5
    assert parse([file, "--config.steps=40"]).settings.eval.every == 20
    assert parse([file, "--config.eval.every=3", "--config.steps=40"]).settings.eval.every == 3


def test_the_quickstarts_entropy_bonus_is_passed_over_by_what_has_none(tmp_path):
    sft = "--config.algorithm.name=sft"
    assert parse([sft]).settings.algorithm.entropy_coef == 0.0
    (line,) = errors_of(sft, "--config.algorithm.entropy_coef=0.1")
    assert line.startswith("algorithm.entropy_coef=0.1 is not read by sft but by grpo, ")
    body = ONE_DEVICE.format('config.algorithm.update(name="sft", entropy_coef=0.1)')
    file = config_file(tmp_path, body)
    assert any("entropy_coef=0.1 is not read by sft" in e for e in errors_of(file))


def test_an_error_inside_a_mapping_is_told_by_its_key():
    gdpo = "--config.algorithm.name=gdpo"
    (line,) = errors_of(gdpo, "--config.algorithm.reward_weights={'a': 'x', 'b': 1}")
    assert line == "algorithm.reward_weights.a='x' must be a float"
    (line,) = errors_of(gdpo, "--config.algorithm.reward_weights=7")
    assert line == "algorithm.reward_weights=7 must be a mapping or none"


def test_zero_that_stands_for_the_context_is_filled_where_it_is_read(tmp_path):
    norm = "--config.algorithm.aggregation=seq-mean-token-sum-norm"
    settings = parse(["--mesh=one_device", norm, "--config.engine.context=200"]).settings
    assert settings.algorithm.max_response_tokens == 200
    given = parse([norm, "--config.algorithm.max_response_tokens=64"]).settings
    assert given.algorithm.max_response_tokens == 64
    assert (
        parse(["--config.algorithm.aggregation=token-mean"]).settings.algorithm.max_response_tokens
        == 0
    )
    (tmp_path / "config.json").write_text(resolved_json(replace(settings, run_id="r")))
    assert parse([f"--run_dir={tmp_path}"]).settings.algorithm == settings.algorithm


def test_partial_config_takes_the_defaults(tmp_path):
    file = config_file(
        tmp_path, "def get_config():\n    return ConfigDict({'steps': 3, 'engine': {'slots': 4}})"
    )
    plain = Settings()
    assert parse([file]).settings == replace(
        plain,
        steps=3,
        model=replace(plain.model, tokenizer="byte"),
        engine=replace(plain.engine, slots=4),
        algorithm=resolved(plain.algorithm),
    )
    overridden = parse(
        [file, "--config.learner.remat=layer", "--config.tasks.sources[0].config.size=8"]
    ).settings
    assert overridden.learner.remat == "layer" and overridden.tasks.sources[0].config == {"size": 8}


def test_mesh_flag_replaces_the_mesh():
    assert parse(["--mesh=one_device"]).settings.mesh == MeshSettings()
    train = parse(["--mesh=mesh_configs/split_8.py:train2"]).settings.mesh.pools[2]
    assert (train.devices, dict(train.axes)) == (2, {"fsdp": 2})


def test_mesh_rules_may_stand_in_one_mapping(tmp_path):
    rules = "{'train': (('mlp', 'tensor'),), 'serve': ()}"
    body = f"def get_config():\n    return ConfigDict({{'pools': [{{}}], 'rules': {rules}}})"
    config_file(tmp_path, body, "mesh.py")
    settings = parse([f"--mesh={tmp_path}/mesh.py"]).settings
    assert settings.mesh.rules_train == (("mlp", "tensor"),)
    assert settings.mesh.pools == (PoolSettings(),)


def test_argument_selects_the_structure(tmp_path):
    file = config_file(tmp_path, """
        def get_config(size="small"):
            config = default_config()
            config.model.num_layers = {"small": 1, "big": 3}[size]
            return config
    """)  # fmt: skip
    assert parse([file]).settings.model.num_layers == 1
    assert parse([file + ":big"]).settings.model.num_layers == 3
    assert "experiment.py:9: KeyError: 'huge'" in errors_of(file + ":huge")[0]


@pytest.mark.parametrize(
    "body, line",
    [
        ("def get_config():\n    return {}", "get_config() returned a dict; it must return a ConfigDict"),
        ("x = 1", "it has no get_config() function"),
        ("def get_config():\n    return 1 +", "experiment.py:7: SyntaxError: invalid syntax"),
        ("def get_config():\n    return undefined", "experiment.py:7: NameError: name 'undefined' is not defined"),
        (ONE_DEVICE.format("config.learner.learning_rat = 1"), "py:9: learner.learning_rat is not a key; did you mean"),
        (ONE_DEVICE.format("config.learner.update(learning_rat=1)"), ": learner.learning_rat is not a key; did you"),
        (ONE_DEVICE.format("config.lerner.remat = 'none'"), ": lerner is not a key; did you mean learner"),
        (ONE_DEVICE.format("config.steps = config.get_ref('stepps') // 2"), ": stepps is not a key; did you mean"),
        (ONE_DEVICE.format("config.teacher.chekpoint = 'x'"), "did you mean checkpoint, teacher.checkpoint, reference"),
        (ONE_DEVICE.format("config.tasks.sources[0].config.size += 1"), "experiment.py:9: AttributeError: "),
        (ONE_DEVICE.format("config.steps = 'many'"), "steps='many' must be an int"),
        (ONE_DEVICE.format("config.steps = None"), "steps=None must be an int"),
        (ONE_DEVICE.format("config.learner = 3"), "learner=3 must be a section with keys learning_rate"),
        (ONE_DEVICE.format("config.tasks.sources[0].tga = 'x'"), "tasks.sources[0].tga is not a key; did you mean"),
        (ONE_DEVICE.format("config.tasks.sources[0].config.f = print"), "config.f=<built-in function print> is a"),
        (ONE_DEVICE.format("config.tasks.sources = []"), "tasks.sources=() is empty"),
    ],
)  # fmt: skip
def test_bad_config_file_is_one_line(tmp_path, body, line):
    errors = errors_of(config_file(tmp_path, body))
    assert len(errors) == 1 and line in errors[0], errors


@pytest.mark.parametrize("value", ["REQUIRED", "required_placeholder(int)"])
def test_required_value_is_asked_for_and_can_be_given(tmp_path, value):
    file = config_file(tmp_path, ONE_DEVICE.format(f"config.steps = {value}"))
    assert errors_of(file) == ["steps is required; give it with --config.steps=..."]
    assert parse([file, "--config.steps=5"]).settings.steps == 5


def test_sampling_limits_hold_for_training_only():
    settings = replace(Settings(), rollout=RolloutSettings(top_p=0.5, temperature=0.0))
    assert len(check(settings, "train")) == 2
    assert check(settings, "eval") == []
    kept = replace(Settings(), rollout=RolloutSettings(top_p=0.5, top_k=20))
    assert check(kept, "train") == []


def test_plugin_names_are_accepted_without_importing_them():
    source = TaskSource(tag="chess", env="json.tool:Chess", reward="json.tool:score")
    settings = replace(Settings(), tasks=replace(Settings().tasks, sources=(source,)))
    assert check(settings) == []


# --- forms and structure -------------------------------------------------------------------------------------------


def test_default_config_is_the_dataclasses_defaults_and_locked():
    config = default_config()
    assert config.learner.learning_rate == Settings().learner.learning_rate
    with pytest.raises(AttributeError):
        config.learner.learning_rat = 1.0
    config.tasks.sources[0].config.anything = 1  # an environment's own keys


def test_resolved_python_gives_the_same_settings(tmp_path):
    settings = parse(
        [
            "--config.seed=5",
            "--config.tasks.sources[0].config.num_maps=9",
            "--config.engine.chunk_sizes=8,9",
        ]
    ).settings
    (tmp_path / "config.resolved.py").write_text(resolved_python(settings))
    assert parse([f"--config={tmp_path}/config.resolved.py"]).settings == settings


def test_run_directory_brings_its_own_config(tmp_path):
    settings = parse(
        ["--config.seed=5", "--config.tasks.sources[0].config.num_maps=9", "--config.run_id=r"]
    ).settings
    (tmp_path / "config.json").write_text(resolved_json(settings))
    again = parse([f"--run_dir={tmp_path}"]).settings
    assert again == settings
    longer = parse(
        [f"--run_dir={tmp_path}", "--config.steps=999", "--config.tasks.sources[0].tag=x"]
    ).settings
    assert (longer.steps, longer.seed, longer.tasks.sources[0].tag) == (999, 5, "x")
    assert parse([f"--run_dir={tmp_path}", "--config=quickstart"]).settings.seed == 0


def test_what_is_wrong_in_a_stored_config_is_told_as_such_with_a_remedy_that_works(tmp_path):
    run, new, file = tmp_path / "r", tmp_path / "new", tmp_path / "r" / "config.json"
    settings = parse(["--config.seed=5"]).settings
    RunDir.open(run, settings, files={"config.resolved.py": resolved_python(settings)}).close()
    tree = json.loads(file.read_text())

    file.write_text("{")
    (line,) = errors_of(f"--run_dir={run}")
    remedy = f"--run_dir=NEW --config={run}/config.resolved.py"
    assert (
        line.startswith(f"{file}, the stored config of a run, cannot be read (") and remedy in line
    )
    # Whoever names a config file is told the same.
    with pytest.raises(RunDirError, match="cannot be read .* go on in a new directory"):
        decide(run, settings)
    said = line.rpartition("with ")[2].replace("NEW", str(new)).split()
    assert parse(said).settings == settings and decide(new, settings).attempt == 0

    file.write_text(json.dumps({**tree, "gone": 1}))
    (line,) = errors_of(f"--run_dir={run}")
    assert line.startswith(f"{file}, the stored config of a run: gone is not a key")
    assert line.endswith("mend it in that file")
    file.write_text(json.dumps({**tree, "seed": "five"}))
    assert "stored config of a run: seed=" in errors_of(f"--run_dir={run}")[0]
    file.write_text(json.dumps({**tree, "steps": -1}))
    (line,) = errors_of(f"--run_dir={run}")
    assert line.startswith("steps=-1 ") and line.endswith(f"(it stands in {file})")


def test_settings_survive_the_way_through_a_tree():
    settings, errors = parse([]).settings, []
    assert schema.build(Settings, schema.to_tree(settings), "", errors) == settings
    assert errors == []
