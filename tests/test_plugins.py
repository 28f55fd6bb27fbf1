"""An algorithm from outside the table: what its class says is what a line of the table would, and is held to it."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_jax import launch
from rl_jax.algorithms import ALGORITHMS, CLIP, RATIO, options
from rl_jax.algorithms.algorithm import Algorithm, Base, missing_members
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.kimi import Kimi
from rl_jax.algorithms.opd import Opd
from rl_jax.algorithms.plugin import Guarded, guarded
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.ppo import Ppo
from rl_jax.algorithms.rm import Rm
from rl_jax.algorithms.token_losses import TokenLoss, cispo
from rl_jax.config import ConfigError, filled, parse
from rl_jax.metrics import read_metrics
from rl_jax.preflight import load_algorithm, load_plugin
from rl_jax.role_source import role_errors
from rl_jax.settings import AlgorithmSettings
from tests.algorithms.test_common import extras_of, some_groups, some_inputs
from tests.test_exit_codes import CONFIG, told


class Capped(PolicyAlgorithm):
    """A loss of its own, which reads one setting of its own."""

    defaults = {**RATIO, "ratio_max": 1.5}
    compares = False

    def estimate(self, scored):
        return scored.spread(scored.totals[0] - 0.5)

    def loss(self, x):
        return cispo(x, ratio_max=self.settings.ratio_max)


class Unsaid(Capped):
    defaults = RATIO  # without the setting that its loss reads


class LastToken(Ppo):
    """What the guide's advice for another critic's algorithm comes to: `estimate` alone."""

    def estimate(self, scored):
        return [a * np.float32(0.5) for a in super().estimate(scored)]


class NearReference(Capped):
    """Needs something of its own, whatever the options."""

    needs = frozenset({"reference_logprobs"})

    def loss(self, x):
        assert x.reference_logprobs is not None
        return cispo(replace(x, old_logprobs=x.reference_logprobs), ratio_max=2.0)


class LastTokenNearReference(LastToken):
    """Adds to what its bases need."""

    needs = frozenset({"reference_logprobs"})


class OwnKimi(Kimi):
    pass


class OwnOpd(Opd):
    pass


class OwnRm(Rm):
    pass


class Lacks:
    """The four members that its page names first, and nothing else."""

    needs = frozenset()

    def __init__(self, settings):
        self.settings = settings

    def select(self, groups):
        return list(groups), []

    def advantages(self, groups, extras, state):
        return [np.zeros(len(t.tokens)) for g in groups for t in g.trajectories], state

    def token_loss(self, x):
        return -x.logprobs * x.advantages, {}


class Four(Base):
    """The same on Base, which has the rest."""

    def __init__(self, settings):
        self.settings = settings

    advantages, token_loss = Lacks.advantages, Lacks.token_loss


class NoArgument(Capped):
    def __init__(self):
        pass


class NoRole(Capped):
    needs = frozenset({"tea_leaves"})


class NoTargets(Capped):
    needs = frozenset({"values"})


class NoKey(Capped):
    defaults = {**RATIO, "ratio_may": 1.5}


class ScalarLoss(Capped):
    def loss(self, x):
        out = super().loss(x)
        return TokenLoss(out.loss.sum(), out.parts)


class OtherBonus(Capped):
    defaults = {**RATIO, "entropy_coef": 0.01}


def named(plugin, *words):
    """(settings as a run has them, the algorithm). Raises ConfigError."""
    words = [CONFIG, f"--config.algorithm.name={__name__}:{plugin.__qualname__}", *words]
    settings = parse(words).settings
    algorithm = load_algorithm(settings, launch.resolve)
    return filled(settings), algorithm


def test_what_a_file_gives_to_another_algorithm_is_passed_over_once_the_plugin_is_known():
    name = f"{__name__}:{Four.__qualname__}"
    words = [CONFIG, f"--config.algorithm.name={name}"]
    unloaded = replace(parse(words).settings.algorithm, entropy_coef=0.01, clip_high=0.3)
    settings = replace(parse(words).settings, algorithm=unloaded)
    known = load_plugin(settings, launch.resolve, frozenset({"algorithm.name"}))
    assert load_algorithm(known, launch.resolve) and known == filled(parse(words).settings)
    for chosen in (None, frozenset({"algorithm.name", "algorithm.clip_high"})):
        with pytest.raises(ConfigError, match="clip_high=0.3 is not read by"):
            load_algorithm(load_plugin(settings, launch.resolve, chosen), launch.resolve)


def test_a_class_says_what_a_line_of_the_table_would():
    settings, algorithm = named(Capped)
    own = settings.algorithm
    assert (own.ratio_max, own.old_policy, own.aggregation) == (1.5, "behaviour", "token-mean")
    assert own.clip_low is None and algorithm.settings == own
    settings, algorithm = named(Capped, "--config.algorithm.ratio_max=1.2")
    assert settings.algorithm.ratio_max == algorithm.settings.ratio_max == 1.2
    assert named(Capped, "--config.rollout.group_size=1")
    entry = options.entry_of(own)
    assert (entry.policy, entry.compares, entry.pulls) == (True, False, False)


def test_what_a_class_does_not_say_is_what_its_bases_say():
    own = named(LastToken)[0].algorithm
    ppo = options.resolved(AlgorithmSettings(name="ppo"))
    assert own == replace(ppo, name=own.name)
    plain = options.entry_of(AlgorithmSettings(name=f"{__name__}:Four"))
    assert not plain.policy and plain.defaults == {"aggregation": "token-mean"} and plain.compares
    silent = options.entry_of(AlgorithmSettings(name="rl_jax.algorithms.policy:PolicyAlgorithm"))
    assert silent.defaults == ALGORITHMS["grpo"].defaults  # as docs/algorithms.md says
    assert options.entry_of(own).compares is ALGORITHMS["ppo"].compares
    target = AlgorithmSettings(name="rl_jax.algorithms.kl_cov:KlCov")
    assert options.entry_of(target) == ALGORITHMS["kl_cov"]


@pytest.mark.parametrize(
    "plugin, needs",
    [
        (LastToken, {"values"}),
        (NearReference, {"reference_logprobs"}),
        (OwnOpd, {"teacher_logprobs"}),
        (LastTokenNearReference, {"values", "reference_logprobs"}),
        (Capped, set()),
    ],
)
def test_needs_are_those_of_the_class_and_of_the_options(plugin, needs):
    name = f"{__name__}:{plugin.__qualname__}"
    for given, more in (({}, set()), ({"old_policy": "recompute"}, {"old_logprobs"})):
        if plugin is OwnOpd and given:
            continue  # it reads no old_policy
        settings = AlgorithmSettings(name=name, **given)
        assert plugin(settings).needs == options.needs(settings) == needs | more
    assert plugin(AlgorithmSettings()).needs >= plugin.needs  # built by hand, under another name


def test_a_plugin_is_run_by_its_needs():
    """Loss and advantages of a subclass see what it said that it needs."""
    x, groups = some_inputs(), some_groups()
    for plugin in (LastToken, NearReference):
        algorithm = named(plugin)[1]
        extras = {name: extras_of(groups)[name] for name in algorithm.needs}
        values, _ = algorithm.advantages(groups, extras, None)
        assert all(np.isfinite(v).all() for v in values)
        absent = {
            n: None for n in ("old_logprobs", "reference_logprobs") if n not in algorithm.needs
        }
        loss, _ = algorithm.token_loss(replace(x, **absent))
        assert np.isfinite(np.where(x.mask, loss, 0)).all()


@pytest.mark.parametrize(
    "plugin, words, line",
    [
        (Lacks, [], "has no samples, trains, counted, token_inputs, learned; derive it from"),
        (NoArgument, [], "cannot be built of AlgorithmSettings: TypeError"),
        (NoRole, [], "needs tea_leaves, which no role computes"),
        (NoTargets, [], "has no targets; derive it from"),
        (NoKey, [], "its defaults name ratio_may, which is no setting of an algorithm"),
        (OtherBonus, [], "its defaults have entropy_coef=0.01, but that default is 0.0 for every"),
        (ScalarLoss, [], "loss() gave a loss that is an array float32[]; it must give the loss of"),
        (
            ScalarLoss,
            ["--config.algorithm.entropy_coef=0.01"],
            "loss() gave a loss that is an array float32[]",
        ),
        (Unsaid, [], "a setting that it reads must be in the `defaults` of its class"),
        (Capped, ["--config.algorithm.clip_low=0.1"], "clip_low=0.1 is not read by"),
        (Four, ["--config.algorithm.kl.coef=0.1"], "kl.coef=0.1 is not read by"),
        (LastToken, ["--config.reference.checkpoint=gone"], "no option of algorithm"),
        (OwnOpd, [], "needs a teacher; set teacher.checkpoint"),
        (OwnRm, ["--config.algorithm.aggregation=none"], "needs rewards, which no role computes"),
        (
            OwnKimi,
            ["--config.algorithm.old_policy=recompute", "--config.algorithm.correction.m2po=0.1"],
            "pulls on tokens without an advantage",
        ),
        (OwnKimi, ["--config.rollout.group_size=1"], "compares the episodes of one task"),
    ],
)
def test_what_a_plugin_gets_wrong_is_one_line_and_no_directory(
    tmp_path, capsys, plugin, words, line
):
    name = f"--config.algorithm.name={__name__}:{plugin.__qualname__}"
    code, lines = told(capsys, tmp_path / "r", name, *words)
    assert code == 2 and len(lines) == 1 and line in lines[0], lines
    assert not (tmp_path / "r").exists()


def test_the_class_of_a_name_is_held_to_its_line(capsys, tmp_path):
    name = "--config.algorithm.name=rl_jax.algorithms.grpo:Grpo"
    code, lines = told(capsys, tmp_path / "r", name, "--config.rollout.group_size=1")
    assert code == 2 and len(lines) == 1 and "compares the episodes of one task" in lines[0]


def test_nothing_is_said_of_a_plugin_before_it_is_loaded():
    words = ["--config.algorithm.name=json.tool:Chess", "--config.rollout.group_size=1"]
    parsed = parse([CONFIG, *words, "--config.critic.updates=3", "--config.algorithm.tau=0.3"])
    assert parsed.settings.algorithm.clip_low is None
    assert not options.is_known(parsed.settings.algorithm)
    assert options.is_known(AlgorithmSettings(name=f"{__name__}:Capped"))


def test_roles_are_checked_by_the_needs_of_the_algorithm_itself():
    settings, algorithm = named(Capped)
    assert list(role_errors(settings, algorithm.needs)) == []
    assert "critic" in "".join(
        role_errors(replace(settings, critic=replace(settings.critic, updates=3)), algorithm.needs)
    )


def test_base_and_policy_algorithm_have_the_whole_protocol():
    assert missing_members(Four(AlgorithmSettings())) == []
    assert missing_members(Grpo(AlgorithmSettings())) == []
    assert set(missing_members(object())) == {
        name for name in (*Algorithm.__annotations__, *vars(Algorithm)) if name[0] != "_"
    }
    with pytest.raises(ConfigError, match="cannot be loaded"):
        launch.resolve(f"{__name__}:NoSuch", ALGORITHMS)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [LastToken, NearReference])
def test_a_plugin_trains_and_goes_on(tmp_path, capsys, plugin):
    """Its own defaults stand in config.json; the same command (once is enough) and a resume by the directory alone are
    the same run."""
    name = f"--config.algorithm.name={__name__}:{plugin.__qualname__}"
    checkpoints = "--config.checkpoint.every=1"
    again = [[name, checkpoints, "--config.steps=4"]] if plugin is LastToken else []
    for words in ([name, checkpoints], *again):
        assert launch.main([CONFIG, f"--run_dir={tmp_path}", *words]) == 0
    assert launch.main([f"--run_dir={tmp_path}", "--config.steps=5"]) == 0
    trained = [row["step"] for row in read_metrics(tmp_path) if "policy/loss" in row]
    assert trained == [1, 2, 3, 4, 5]
    said = "clip_low" if plugin is LastToken else "ratio_max"
    text = (Path(tmp_path) / "config.json").read_text()
    assert f'"{said}": {CLIP.get(said, 1.5)}' in text


class Wrong(PolicyAlgorithm):
    """Breaks in the function, and the way, that its name says: Wrong.named_after("estimate", None)."""

    compares = False
    part, gives = "", None

    def estimate(self, scored):
        return self._or("estimate", scored.spread(scored.totals[0] - 0.5))

    def loss(self, x):
        return self._or("loss", cispo(x, ratio_max=2.0))

    def advantages(self, groups, extras, state):
        return self._or("advantages", super().advantages(groups, extras, state))

    def select(self, groups):
        return self._or("select", super().select(groups))

    def trains(self, trajectory):
        return self._or("trains", super().trains(trajectory))

    def counted(self, groups, advantages, extras):
        return self._or("counted", super().counted(groups, advantages, extras))

    def token_inputs(self, groups, advantages, extras, state):
        return self._or("token_inputs", super().token_inputs(groups, advantages, extras, state))

    def token_loss(self, x):
        return self._or("token_loss", super().token_loss(x))

    def learned(self, state, metrics):
        return self._or("learned", super().learned(state, metrics))

    def _or(self, part, right):
        if part != self.part:
            return right
        return self.gives(right) if callable(self.gives) else self.gives


def wrong(part, gives):
    """A plugin whose function `part` gives `gives`, or gives(what would be right)."""
    said = staticmethod(gives) if callable(gives) else gives
    return type("Wrong", (Wrong,), {"part": part, "gives": said})


def _raise(right):
    raise KeyError("no such part")


SHAPES = [
    ("estimate", None, "estimate() gave None; it must give one f32[T] for each of the 4"),
    ("estimate", lambda right: right[:3], "estimate() gave 3 arrays for 4 trajectories"),
    ("estimate", lambda right: [a[:5] for a in right], "estimate() gave shape (5,) for trajectory"),
    ("estimate", lambda right: [None] * 4, "estimate() gave None for trajectory r/0/0/0 (number 0)"),
    ("advantages", None, "advantages() gave None; it must give (one f32[T] a trajectory, the next"),
    ("advantages", lambda right: right[0], "advantages() gave a list of 4 ("),
    ("advantages", lambda right: (None, None), "advantages() gave None; it must give one f32[T]"),
    ("advantages", lambda right: (right[0], {1j}), "advantages() gave a state that is no JSON"),
    ("select", None, "select() gave None; it must give (the groups to train on, (uid, reason)"),
    ("select", lambda right: right[0], "select() gave a list of 1 (a Group); it must"),
    ("select", lambda right: ([], []), "select() gave of group r/0/0 0 kept and nothing dropped"),
    ("select", lambda right: (right[0], ["x"]), "select() gave a tuple of 2"),
    ("trains", None, "trains() gave None; it must give True or False"),
    ("counted", lambda right: [1], "counted() gave 1 arrays for 4 trajectories"),
    ("token_inputs", None, "token_inputs() gave None; it must give a mapping"),
    ("token_inputs", {"selected": [1.0]}, "token_inputs()['selected'] gave 1 arrays for 4"),
    ("loss", None, "loss() gave None; it must give a token_losses.TokenLoss(loss, parts)"),
    ("loss", lambda right: right.loss, "loss() gave an array float32[1, 8]; it must give a token_l"),
    ("loss", lambda right: right._replace(loss=right.loss.mean()), "loss() gave a loss that is"),
    ("token_loss", None, "token_loss() gave None; it must give the loss of each token, of shape (1,"),
    ("token_loss", lambda right: right[0], "token_loss() gave an array float32[1, 8]"),
    ("token_loss", lambda right: (right[0][:, 1:], right[1]), "that is an array float32[1, 7]"),
    ("token_loss", lambda right: (right[0], None), "token_loss() gave sums that are None"),
    ("token_loss", lambda right: (right[0], {"a/b": right[0]}), "the figure 'a/b' as an array"),
    ("token_loss", _raise, "token_loss() raised KeyError: 'no such part' ("),
    ("loss", _raise, "token_loss() raised KeyError: 'no such part' ("),
]  # fmt: skip


@pytest.mark.parametrize("part, gives, line", SHAPES)
def test_what_a_plugin_gives_in_the_wrong_shape_is_told_before_a_run_begins(
    monkeypatch, part, gives, line
):
    monkeypatch.setattr(sys.modules[__name__], "Broken", wrong(part, gives), raising=False)
    words = [CONFIG, f"--config.algorithm.name={__name__}:Broken"]
    with pytest.raises(ConfigError) as error:
        load_algorithm(parse(words).settings, launch.resolve)
    (told_line,) = error.value.errors
    assert told_line.startswith(f"algorithm.name={__name__}:Broken: ") and line in told_line


@pytest.mark.parametrize("part", ["", "estimate", "advantages", "select", "trains"])
def test_what_only_invented_episodes_may_break_is_left_to_the_run(monkeypatch, part):
    gives = (lambda right: [a * np.nan for a in right]) if part == "estimate" else _raise
    monkeypatch.setattr(sys.modules[__name__], "Broken", wrong(part, gives), raising=False)
    load_algorithm(parse([CONFIG, f"--config.algorithm.name={__name__}:Broken"]).settings, launch.resolve)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, gives, line",
    [
        ("estimate", lambda right: [a * np.nan for a in right], "advantages() gave nan for trajectory "),
        ("estimate", _raise, "advantages() raised KeyError: 'no such part' ("),
        ("select", _raise, "select() raised KeyError: 'no such part' ("),
        ("learned", _raise, "learned() raised KeyError: 'no such part' ("),
        ("learned", {1}, "learned() gave a state that is no JSON"),
    ],
)  # fmt: skip
def test_what_a_plugin_does_at_run_time_is_one_line_and_its_frames_are_in_the_log(
    tmp_path, capsys, monkeypatch, part, gives, line
):
    monkeypatch.setattr(sys.modules[__name__], "Broken", wrong(part, gives), raising=False)
    code, lines = told(capsys, tmp_path, f"--config.algorithm.name={__name__}:Broken")
    assert code == 2 and len(lines) == 1, lines
    assert f"algorithm.name={__name__}:Broken: {line}" in lines[0]
    if gives is _raise:
        log = tmp_path / "logs" / "attempt_0" / "driver.log"
        assert "test_plugins.py:" in lines[0] and f"its traceback is in {log}" in lines[0]
        assert 'raise KeyError("no such part")' in log.read_text()


def test_an_algorithm_of_the_table_is_not_guarded():
    settings = parse([CONFIG]).settings
    assert type(load_algorithm(settings, launch.resolve)) is Grpo
    assert not isinstance(guarded("rl_jax.algorithms.grpo:Grpo", object()), Guarded)
    assert isinstance(named(Capped)[1], Guarded)
