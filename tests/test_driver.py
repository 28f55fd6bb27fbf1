"""The whole loop: against a straight reference, across meshes, and through its ends."""

import json
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rl_jax import launch, report
from rl_jax.algorithms.grpo import Grpo
from rl_jax.checkpoint import Checkpointer
from rl_jax.config import parse
from rl_jax.driver import Driver, DriverState, SyncFailed
from rl_jax.engine.chunks import Piece
from rl_jax.engine.chunks import pack as pack_chunk
from rl_jax.engine.engine import JaxEngine
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.learner.learner import Learner
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.metrics import Metric
from rl_jax.models.decoder import build_model
from rl_jax.rollout.bound import Bound
from rl_jax.rollout.episode import env_seed, sample_seed
from rl_jax.rollout.tasks import TaskStream
from rl_jax.rollout.traces import read_groups, read_traces
from rl_jax.settings import RolloutSettings, Settings, WeightSettings
from rl_jax.testing.envs import EvenEnv
from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.tools import view
from rl_jax.types import Group, Outcome, Reward, SlotSampling, SyncResult, Trajectory
from tests.timeline_checks import check_chrome, check_timeline, exported

pytestmark = pytest.mark.slow(seconds=5)

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"
STEPS = 3
FOUR = "--config.rollout.group_size=4"  # rewards of a group of two may be equal, and then nothing is learned


def run_job(directory, *words, config=CONFIG):
    assert launch.main([config, f"--run_dir={directory}", *words]) == 0
    return directory


@pytest.fixture(scope="session")
def one_device(tmp_path_factory):
    """A synchronous run on one device that also saved what it trained."""
    return run_job(tmp_path_factory.mktemp("one") / "run", FOUR)


@pytest.fixture(scope="session")
def split(tmp_path_factory):
    """The same on the split mesh, training on two devices."""
    return run_job(tmp_path_factory.mktemp("split") / "run", FOUR, "--mesh=split_8:train2")


def rows(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


class Reference:
    """A synchronous run without threads, servers, queues or ledger: one slot, one episode after the other."""

    def __init__(self, settings):
        self.s, tokenizer = settings, ByteTokenizer()
        plan = MeshPlan.from_settings(settings.mesh)
        meshes = build_meshes(plan)
        self.model = build_model(settings.model, tokenizer.vocab_size)
        self.renderer, self.algorithm = ChatRenderer(tokenizer), Grpo(settings.algorithm)
        server = plan.servers[0]
        self.engine = JaxEngine(
            self.model, meshes.servers[server.name], server.rules, settings.engine, "reference"
        )
        self.learner = Learner(
            self.model, meshes.train, plan.train.rules, self.algorithm, settings.learner,
            max_rows=4, temperature=settings.rollout.temperature, total_steps=settings.steps,
        )  # fmt: skip
        self.learner.init(jax.random.key(settings.seed))
        self.stream = TaskStream({"even": EvenEnv.tasks({}, "train")}, settings.seed)

    def run(self):
        for version in range(self.s.steps):
            issued = [self.stream.next() for _ in range(self.s.rollout.batch_groups)]
            groups = [
                self.group(i, version) for i in sorted(issued, key=lambda i: (i.epoch, i.index))
            ]
            batch = pack(groups, self.s.learner)
            batch, _ = with_advantages(batch, groups, {}, self.algorithm, None, self.s.algorithm)
            self.learner.step(batch, version=version)
        return jax.device_get(self.learner.params)

    def group(self, issued, version):
        members = [self.episode(issued, k, version) for k in range(self.s.rollout.group_size)]
        name = f"{issued.epoch}/{issued.index}"
        return Group(name, issued.task.id, "even", issued.epoch, issued.index, tuple(members))

    def episode(self, issued, sample, version):
        env, params = EvenEnv(), self.learner.params
        seen = env.reset(issued.task, env_seed(self.s.seed, issued.epoch, issued.index))
        context = list(self.renderer.first(issued.task.messages + seen.messages))
        logprobs, sampled, rewards = [0.0] * len(context), [False] * len(context), []
        state, known = self.engine.init_state(), 0  # of the context, tokens whose KV is in the slot
        while len(rewards) < self.s.rollout.max_turns:
            seed = sample_seed(self.s.seed, issued.epoch, issued.index, sample, len(rewards))
            state, tokens, values = self.turn(params, state, context, known, seed)
            context += tokens
            known = len(context) - 1
            logprobs, sampled = logprobs + values, sampled + [True] * len(tokens)
            seen = env.step(self.renderer.parse(np.array(tokens)))
            rewards.append(seen.reward)
            if seen.done or len(rewards) == self.s.rollout.max_turns:
                break
            added = self.renderer.next(
                seen.messages, closed=self.renderer.is_closed(np.array(tokens))
            )
            context += list(added)
            logprobs, sampled = logprobs + [0.0] * len(added), sampled + [False] * len(added)
        mask = np.array(sampled)
        return Trajectory(
            f"{issued.epoch}/{issued.index}/{sample}", 0, f"{issued.epoch}/{issued.index}",
            issued.task.id, issued.epoch, issued.index, sample, "even",
            np.array(context, np.int32), mask, np.array(logprobs, np.float32),
            np.where(mask, version, -1).astype(np.int32), np.zeros(len(mask), bool),
            np.zeros(len(mask), np.int16), np.array(rewards, np.float32), (), (),
            Reward(float(sum(rewards)), {}, (), "scored", ""), Outcome.OK, None, None, version,
        )  # fmt: skip

    def turn(self, params, state, context, known, seed):
        """What the slot lacks of the context is appended, then a block is generated."""
        s, slot = self.s, np.zeros(1, np.int32)
        tables = np.arange(s.engine.slots * s.engine.table_pages, dtype=np.int32)
        tables = tables.reshape(s.engine.slots, -1)
        params = self.engine.pack(dict(params))
        for start in range(known, len(context) - 1, s.engine.chunk_sizes[-1]):
            piece = context[start : min(start + s.engine.chunk_sizes[-1], len(context) - 1)]
            chunk = pack_chunk([Piece(np.array(piece, np.int32), start)], s.engine.chunk_sizes)
            state = self.engine.append(params, state, tables[:1], chunk)
        stops = self.renderer.tokenizer.stop_token_ids
        padded = [*stops, *[-1] * (s.engine.num_stop_tokens - len(stops))]

        def one(value, dtype):
            return np.array([value], dtype)

        state = self.engine.arm(
            state, slot,
            SlotSampling(
                one(context[-1], np.int32), one(len(context), np.int32), one(seed, np.uint64),
                one(0, np.int32), one(s.rollout.max_new_tokens, np.int32), one(1.0, np.float32),
                one(1.0, np.float32), one(0, np.int32), np.array([padded], np.int32),
                one(1, np.int32),
            ),
        )  # fmt: skip
        state, block = self.engine.generate(
            params, state, tables
        )  # max_new_tokens fits into one block
        valid = np.asarray(block.valid)[0]
        tokens, logprobs = (
            np.asarray(a)[0][valid].tolist() for a in (block.tokens, block.logprobs)
        )
        return state, tokens, logprobs


@pytest.mark.bits
def test_synchronous_training_equals_a_straight_loop_bit_for_bit(one_device):
    settings = parse([CONFIG, FOUR]).settings
    assert settings.rollout.max_new_tokens <= settings.engine.steps_per_block
    reference = Reference(settings)
    wanted = reference.run()
    state, extra = Checkpointer(one_device, settings.checkpoint).restore(
        STEPS, reference.learner.abstract_state()
    )
    assert extra["version"] == STEPS
    differing = [n for n in wanted if not np.array_equal(wanted[n], np.asarray(state.params[n]))]
    assert not differing
    trained = rows(one_device)
    assert all(row["optim/grad_norm"] > 0.1 for row in trained), (
        "a step learned nothing in either loop"
    )


def test_the_sampler_and_the_trainer_agree_at_lag_zero(one_device, split):
    for directory in (one_device, split):
        summary = json.loads((directory / "summary.json").read_text())
        assert 0 < summary["mismatch"]["lag0_mean_abs"] < 1e-5


def test_a_run_that_loses_nothing_trains_all_that_it_sampled(one_device):
    assert [row["goodput/sample"] for row in rows(one_device)] == [1.0] * STEPS


def test_they_agree_at_another_temperature_too(tmp_path):
    run = run_job(tmp_path / "run", "--config.rollout.temperature=0.7", "--config.steps=2")
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["mismatch"]["lag0_mean_abs"] < 1e-5
    assert any(row["optim/grad_norm"] > 0 for row in rows(run))


def test_replaying_saved_batches_gives_the_same_loss_on_both_meshes(one_device, tmp_path):
    """The loss holds the entropy, which the weights change: another learning rate would be another loss."""
    words = [
        f"--config.rollout.replay_dir={one_device}", FOUR, "--config.algorithm.entropy_coef=1.0",
        "--config.learner.learning_rate=0.003",
    ]  # fmt: skip
    runs = [
        run_job(tmp_path / name, "--mode=train_only", *words, *more)
        for name, more in {"one": (), "split": ("--mesh=split_8:train4",)}.items()
    ]
    losses = [[row["policy/loss"] for row in rows(directory)] for directory in runs]
    assert len(losses[0]) == STEPS and np.abs(np.diff(losses[0])).min() > 1e-2, losses[0]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-4, rtol=0)


def test_sampled_tokens_agree_between_the_meshes_at_staleness_zero(one_device, split):
    total = same = 0
    for step in range(1, STEPS + 1):
        ours, theirs = (
            {t.uid.partition("/")[2]: t for g in read_groups(d / f"rollouts/step_{step}/train") for t in g.trajectories}
            for d in (one_device, split)
        )  # fmt: skip
        assert ours.keys() == theirs.keys()
        total += len(ours)
        same += sum(np.array_equal(ours[u].tokens, theirs[u].tokens) for u in ours)
    assert same / total >= 0.98


def test_the_ledger_accounts_for_every_episode(one_device):
    summary = json.loads((one_device / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["episodes"]["TRAINED"] == STEPS * 8
    assert summary["episodes"]["EVALUATED"] == 2 * 2  # before and after
    assert not summary["episodes"]["RUNNING"]


def test_a_person_reads_figures_an_episode_and_four_commands_that_work(one_device):
    settings = parse([CONFIG, FOUR]).settings
    summary = json.loads((one_device / "summary.json").read_text())
    where = SimpleNamespace(path=one_device)
    lines = report.closing_lines(where, "train", summary, STEPS, settings)
    value = summary["tasks"]["even"]
    assert lines[0].startswith(f"train: {STEPS} steps in ")
    assert lines[1] == f"  success even  {value['first']:.3f} -> {value['last']:.3f}"
    assert f"  episodes: {STEPS * 8} trained, 4 evaluated" in lines
    sample = lines.index(
        next(line for line in lines if line.startswith("one episode (even, version 3"))
    )
    assert lines[sample + 1].startswith("  turn 0  '") and any("even " in x for x in lines[sample:])
    commands = lines[lines.index("next:") + 1 :]
    assert len(commands) == 4
    words = shlex.split(commands[0], comments=True)
    assert words[1:] == ["-m", "rl_jax.tools.view", str(one_device)]
    assert view.main([*words[3:], "--text"]) == 0
    for command, mode, staleness in zip(commands[1:], ("eval", "train", "train"), (0, 0, 1)):
        words = shlex.split(command, comments=True)
        assert words[1:3] == ["-m", "rl_jax.launch"]
        parsed = parse(words[3:])
        assert parsed.options.mode == mode
        assert parsed.settings.rollout.max_staleness == staleness


def test_asynchronous_training_holds_its_staleness_bound(tmp_path):
    directory = run_job(
        tmp_path, "--mesh=split_8:train1", "--config.rollout.max_staleness=1", "--config.steps=4"
    )
    stale = [row["staleness/max"] for row in rows(directory)]
    assert max(stale) == 1
    ledger = map(json.loads, (directory / "ledger.jsonl").read_text().splitlines())
    assert not [record["uid"] for record in ledger if record["reason"] == "run_end"]
    assert "mismatch/abs_mean_lag1_pure" in rows(directory)[-1]
    goodput = check_timeline(directory)
    assert all(pool.run > 0.001 for pool in goodput.pools.values())


def test_adaptive_bound_holds_from_step_to_step_and_through_a_resume(tmp_path):
    words = ["--mesh=split_8:train1", "--config.rollout.max_staleness=3"]
    words += ["--config.rollout.staleness_policy=adaptive"]
    run_job(tmp_path, *words, "--config.steps=6")
    (step,) = (tmp_path / "checkpoints").glob("step_*")
    saved = json.loads((step / "MANIFEST.json").read_text())["extra"]["bound"]
    assert set(saved["brought"]) == {"2"} and saved["now"] in (1, 2, 3)
    run_job(tmp_path, *words, "--config.steps=9")
    found = rows(tmp_path)
    bounds = [row["staleness/bound"] for row in found]
    assert bounds[:5] == [2] * 5 and bounds[6] == saved["now"] and len(bounds) == 9
    assert all(row["staleness/max"] <= row["staleness/bound"] for row in found)
    assert all(0 <= row["time/slots_idle_s"] <= row["time/step_s"] * 3 for row in found)
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    told = [
        (event["step"], event["bound"]) for event in events if event["kind"] == "staleness_bound"
    ]
    changed = [(i, b) for i, (a, b) in enumerate(zip(bounds, bounds[1:]), 1) if a != b]
    assert [pair for pair in told if pair[0] < 9] == changed
    goodput = check_timeline(tmp_path)  # of both attempts
    train = goodput.pools["train"].buckets
    assert train["recovery"] > 0 and train["wasted_after_crash"] == 0.0, "it went on from its end"
    assert check_timeline(tmp_path, (7, 9)).pools["decode"].buckets["recovery"] == 0.0


def test_a_change_of_the_bound_reaches_the_rollout_and_is_told():
    events, bounds = [], []
    parts = SimpleNamespace(
        rollout=SimpleNamespace(set_bound=bounds.append),
        recorder=SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields))),
    )
    adaptive = RolloutSettings(max_staleness=2, staleness_policy="adaptive")
    driver = Driver(parts, Settings(rollout=adaptive), DriverState(bound=Bound(1)))
    metrics = {
        "time/step_s": Metric(10.0, 1), "time/wait_for_batch_s": Metric(8.0, 1), "is/ess": Metric(0.9, 1),
    }  # fmt: skip
    idle_s = 0.0
    for step in range(1, 4):
        idle_s += 5.0  # cumulative
        assert driver._adapt(step, metrics, {"time/slots_idle_s": idle_s}) == 1
    assert driver.state.bound.brought[1].idle_s == 15.0
    assert bounds == [2] and driver.state.bound.now == 2
    assert events == [
        (
            "staleness_bound",
            {"step": 3, "bound": 2, "before": 1, "worth_per_s": {"1": pytest.approx(0.09)}},
        )
    ]
    fixed = Driver(parts, Settings(rollout=RolloutSettings(max_staleness=2)), DriverState())
    assert fixed._adapt(1, metrics, {"time/slots_idle_s": 5.0}) == 2 and len(bounds) == 1


def test_sum_norm_aggregation_divides_by_the_context_unless_told_otherwise(one_device, tmp_path):
    words = ["--mode=train_only", f"--config.rollout.replay_dir={one_device}", "--config.steps=1"]
    words += ["--config.algorithm.name=sft"]  # its loss is never 0
    norm = "--config.algorithm.aggregation=seq-mean-token-sum-norm"
    default, told = (
        rows(run_job(tmp_path / name, *words, norm, *more))[0]["policy/loss"]
        for name, more in {
            "default": (),
            "told": ("--config.algorithm.max_response_tokens=128",),
        }.items()
    )
    assert default == told > 0


@pytest.mark.parametrize("state, tries", [("ABORTED", 3), ("FAILED", 1)])
def test_sync_that_fails_says_what_failed_on_which_server(state, tries):
    detail = "decode.0: digest differs for parameter embed; decode.1: OSError: gone"
    events, asked = [], []

    def publish(params, version):
        asked.append(version)
        return SyncResult(state, 0, (), ("decode.1",), 0, 0.0, 0.0, detail)

    parts = SimpleNamespace(
        sync=SimpleNamespace(publish=publish),
        learner=SimpleNamespace(params={}),
        recorder=SimpleNamespace(
            event=lambda kind, **fields: events.append(fields), doing=lambda what: nullcontext()
        ),
    )
    settings = Settings(weights=WeightSettings(retries=2))
    with pytest.raises(SyncFailed) as failed:
        Driver(parts, settings, DriverState()).publish(1)
    assert len(asked) == tries and [event["detail"] for event in events] == [detail] * tries
    assert f"version 1 ended {state} after {tries} of 3 tries: {detail}" in str(failed.value)


def test_rollout_only_saves_episodes_and_trains_nothing(tmp_path):
    directory = run_job(tmp_path / "a", "--mode=rollout_only", "--config.steps=2")
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["episodes"]["TRAINED"] == 0
    assert summary["episodes"]["DROPPED"] == 8
    replayed = run_job(
        tmp_path / "b",
        "--mode=train_only",
        f"--config.rollout.replay_dir={directory}",
        "--config.steps=2",
    )
    assert len(rows(replayed)) == 2
    # Two versions were published, of the same weights: what is saved says what sampled it.
    ages = [row["staleness/mean"] for row in rows(replayed)]
    assert ages == [0, 1]
    for step in (1, 2):
        for t in read_traces(directory / f"rollouts/step_{step}/train"):
            assert t.start_version == 0 and set(t.versions[t.loss_mask].tolist()) == {0}
            assert not t.context_mixed.any()
    assert summary["saved"] == 8


# --- roles beside the policy ---

APART = """
from ml_collections import ConfigDict

def get_config(arg=""):
    pools = [ConfigDict({"name": n, "kind": k, "devices": d, "replicas": 1, "axes": a}) for n, k, d, a in (
        ("all", "colocated", 1, {}), ("critic", "role", 1, {}), ("frozen", "role", 2, {"fsdp": 2}))]
    return ConfigDict({"name": "apart", "platform": "cpu", "pools": pools, "rules_train": (), "rules_serve": ()})
"""


def replay(directory, source, *words):
    return run_job(directory, "--mode=train_only", f"--config.rollout.replay_dir={source}", *words)


@pytest.fixture(scope="module")
def with_roles(one_device, tmp_path_factory):
    """PPO with a critic and a KL to what it started from, on the saved episodes; not interrupted."""
    root = tmp_path_factory.mktemp("roles")
    return replay(root / "run", one_device, *PPO_AND_KL)


PPO_AND_KL = ("--config.algorithm.name=ppo", "--config.algorithm.kl.coef=0.1")


def test_critic_and_reference_are_the_same_ones_after_a_resume(one_device, with_roles, tmp_path):
    replay(tmp_path, one_device, *PPO_AND_KL, "--config.steps=2")
    replay(tmp_path, one_device, *PPO_AND_KL)
    whole, cut = rows(with_roles), rows(tmp_path)
    assert abs(whole[0]["policy/kl"]) < 1e-6 < whole[2]["policy/kl"]
    for name in ("policy/kl", "policy/loss", "critic/loss", "critic/value", "critic/grad_norm"):
        assert [row[name] for row in cut] == [row[name] for row in whole], name
    (tmp_path / "reference").rename(tmp_path / "gone")
    words = ["--mode=train_only", f"--config.rollout.replay_dir={one_device}", *PPO_AND_KL]
    assert launch.main([CONFIG, f"--run_dir={tmp_path}", *words, "--config.steps=4"]) == 3


def test_critic_and_reference_on_pools_of_their_own_train_the_same(
    one_device, with_roles, tmp_path
):
    (tmp_path / "apart.py").write_text(APART)
    words = (f"--mesh={tmp_path / 'apart.py'}", "--config.critic.pool=critic")
    apart = replay(
        tmp_path / "run", one_device, *PPO_AND_KL, *words, "--config.reference.pool=frozen"
    )
    for there, here in zip(rows(apart), rows(with_roles), strict=True):
        for name in ("policy/kl", "critic/loss", "critic/grad_norm", "optim/grad_norm"):
            assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name


def test_teacher_is_of_its_own_size_and_stays_the_checkpoint_it_was(
    one_device, with_roles, tmp_path, capsys
):
    """The student is narrower; the teacher's run goes on meanwhile."""
    teacher = shutil.copytree(with_roles, tmp_path / "teacher")
    words = [
        "--config.algorithm.name=opd", f"--config.teacher.checkpoint={teacher}",
        "--config.model.embed_size=16",
    ]  # fmt: skip
    student = replay(tmp_path / "student", one_device, *words, "--config.steps=1")
    pin = json.loads((student / "roles.json").read_text())["teacher"]
    assert pin["checkpoint"] == str(teacher / "checkpoints" / f"step_{STEPS}")
    assert rows(student)[0]["policy/reverse_kl"] != 0
    shutil.copytree(teacher / "checkpoints" / "step_3", teacher / "checkpoints" / "step_9")
    replay(student, one_device, *words, "--config.steps=2")  # the newer one is not looked at
    assert json.loads((student / "roles.json").read_text())["teacher"] == pin
    shutil.rmtree(teacher / "checkpoints" / "step_3")
    args = ["--mode=train_only", f"--config.rollout.replay_dir={one_device}", *words]
    assert launch.main([CONFIG, f"--run_dir={student}", *args, "--config.steps=3"]) == 3
    assert "teacher of this run cannot be read" in capsys.readouterr().err


def test_a_teacher_inside_the_step_is_of_its_own_size(one_device, with_roles, tmp_path, capsys):
    """distill: loss and figure are one number, another one where the divergence is; a pool of its own is refused."""
    words = [
        "--config.algorithm.name=distill", f"--config.teacher.checkpoint={with_roles}",
        "--config.model.embed_size=16", "--config.steps=1",
    ]  # fmt: skip
    (row,) = rows(replay(tmp_path / "student", one_device, *words))
    assert row["policy/loss"] == pytest.approx(row["policy/teacher_divergence"], rel=1e-5)
    assert row["policy/loss"] > 0 and row["optim/grad_norm"] > 0
    assert "alarm/zero_signal" not in row
    (tmp_path / "apart.py").write_text(APART)
    apart = [
        f"--mesh={tmp_path / 'apart.py'}",
        "--config.teacher.pool=frozen",
        "--config.critic.pool=critic",
    ]
    args = ["--mode=train_only", f"--config.rollout.replay_dir={one_device}", *words, *apart]
    assert launch.main([CONFIG, f"--run_dir={tmp_path / 'no'}", *args]) == 2
    assert "distill runs the teacher inside the policy's step" in capsys.readouterr().err


def test_a_step_with_a_teacher_is_lowered_in_a_dry_run(one_device, with_roles, tmp_path, capsys):
    words = ["--config.algorithm.name=distill", f"--config.teacher.checkpoint={with_roles}"]
    assert launch.main([CONFIG, f"--run_dir={tmp_path / 'plan'}", "--dry_run", *words]) == 0
    programs = json.loads((tmp_path / "plan" / "plan.json").read_text())["programs"]
    assert "policy step" in programs and not [name for name in programs if "teacher" in name]


def test_what_nothing_needs_is_not_there(one_device):
    assert not (one_device / "reference").exists() and not (one_device / "roles.json").exists()
    leaves = Checkpointer(one_device, parse([CONFIG]).settings.checkpoint).manifest(STEPS)["leaves"]
    assert not [name for name in leaves if name.startswith("critic")]


def test_timelines_of_runs_add_up_and_their_pictures_are_sound(one_device, split, tmp_path):
    """Colocated and on separate meshes; what the metrics say of each step is what the timeline shows."""
    for run in (one_device, split):
        goodput = check_timeline(run)
        assert all(pool.run > 0.001 for pool in goodput.pools.values())
        assert goodput.sched == 1.0 and goodput.sample == 1.0
        trained = {f"step {row['step']}": row for row in rows(run)}
        slices, arrows = check_chrome(exported(run, tmp_path))
        laps = {s["name"]: s for t in slices.values() for s in t if s["name"] in trained}
        assert laps.keys() == trained.keys()
        for name, row in trained.items():
            assert laps[name]["dur"] / 1e6 == pytest.approx(row["time/step_s"], abs=1e-5)
            assert 0 < row["goodput/run"] <= 1
        episodes = [s for t in slices.values() for s in t if s["cat"] == "episode"]
        ends = {s["args"]["episode"]: s["args"]["state"] for s in episodes}
        num_trained = sum(state == "TRAINED" for state in ends.values())
        assert num_trained == STEPS * 2 * 4
        whole = [stops for stops in arrows.values() if len(stops) == 3]
        assert len(whole) == num_trained, "prompt, episode and step of each"
    shares = rows(split)[-1]
    devices = {name: pool.devices for name, pool in check_timeline(split).pools.items()}
    of_all = sum(num * shares[f"goodput/run.{name}"] for name, num in devices.items())
    assert shares["goodput/run"] == pytest.approx(of_all / sum(devices.values()))
