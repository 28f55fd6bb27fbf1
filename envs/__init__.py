"""ENVS: the environments by name. Importing it imports none of them.

`python -m rl_jax.tools.check_env NAME` says what is wrong with one; docs/environments.md has those that are here.

An environment is one file here: a class with the Environment protocol of rl_jax.types, plain blocking
Python. It runs in a worker process that is bounded and killable, so it may block, raise and print. It
imports rl_jax.types, rl_jax.sandbox and its own libraries, nothing else of rl_jax.

    from dataclasses import dataclass

    from envs import read_config
    from rl_jax.types import Message, StepResult, Task


    @dataclass(frozen=True)
    class AdderConfig:
        num_tasks: int = 64


    class Adder:
        splits = ("train", "eval")  # the splits tasks() knows; optional, this is the default

        @classmethod
        def tasks(cls, cfg, split):  # len() and [i], deterministic
            num = read_config(AdderConfig, cfg).num_tasks
            first = 0 if split == "train" else num  # held-out tasks, and their ids, are not train's
            return [
                Task(
                    id=f"{split}/{i}",  # of 1 to 256 characters, stable over runs
                    env="", tag="", reward="env",  # filled in from the task source
                    messages=(Message("user", f"{i} + 7 ="),),
                    payload={"a": i, "b": 7},  # the policy never sees it; as JSON
                    max_turns=2,  # 1 or more
                )
                for i in range(first, first + num)
            ]

        def reset(self, task, seed):
            self.sum, self.left = task.payload["a"] + task.payload["b"], task.max_turns
            return StepResult(())  # what the task's messages do not say; no reward

        def step(self, action):
            self.left -= 1
            if action.text.strip() == str(self.sum):
                return StepResult((), reward=1.0, done=True)
            return StepResult((Message("user", "no"),), reward=0.0, done=self.left == 0)

        def close(self): ...

        # optional: the next scripted action, a text or a Message with tool calls; raises LookupError where a
        # task has none
        def script(self, rng, skill):
            return str(self.sum) if rng.random() < skill else "1"

The policy's first context is task.messages followed by the messages of reset(); the messages of a result with
done=True are not rendered. Task.env, tag and reward are filled in by the worker from the task source, and Task.id
is prefixed with the tag. All an episode needs lies in its Task, as JSON: an instance is made without arguments.

What tasks(), reset(), step() and script() give is checked in the worker, and refused by the field with the value and
what may stand there; ids of a held-out split that train has too are refused before the run.

Tools: a Task with `tools` (JSON schemas) has its turns parsed for calls: Action.tool_calls holds those that name a tool
and have its arguments, Action.text what was said beside them. A call that cannot be read or made never comes here; the
episode tells the policy why. Without tools, Action.text is all that was said.

Rewards: a finite float from every step(); 0.0 says "no reward". None (what StepResult has where none is given) or NaN
from any step makes an episode whose reward is "env" unscored, and what is unscored is never trained: it counts as a
failure of the environment, and rollout.max_env_failures of them in a row end the run. Where the task source names a
scorer, rewards of steps may be None. reset() gives no reward.

Roles: StepResult.to_agent says which role the next turn is of, where the policy plays several in one conversation (both
sides of a game). What a role gets goes into info["reward/ROLE"]; the last value of an episode counts, and becomes the
part of the reward that algorithms by role train the role's turns on. Without it a role gets the rewards of its own
turns.

Environment variables: a worker sees those of rl_jax/child.py INHERITED (PATH, HOME and seven more), so that
no token or key of the driver's reaches an environment by accident, and there is no setting that adds one. What an
environment needs goes through the task source's config, which tasks(cfg, split) puts into each Task's payload:
--config.tasks.sources[0].config.url=http://... . The run directory stores configs, so a secret stays in a file of its
own: give the file's path in the config, and read it in the environment.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

# name -> "module:attribute"; any other name is taken as "package.module:attribute" itself.
ENVS: dict[str, str] = {
    "calculator": "envs.calculator:Calculator",
    "code_tool": "envs.code_tool:CodeTool",
    "frozen_lake": "envs.frozen_lake:FrozenLake",
    "gymnasium": "envs.gymnasium:Gymnasium",
    "maze": "envs.maze:Maze",
    "outside_agent": "envs.outside_agent:OutsideAgent",
    "reasoning_gym": "envs.reasoning_gym:ReasoningGym",
    "shell": "envs.shell:Shell",
    "sokoban": "envs.sokoban:Sokoban",
    "textarena": "envs.textarena:TextArena",
    "two_player": "envs.two_player:TwoPlayer",
}


def read_config(cls: type, cfg: Mapping[str, Any]) -> Any:
    """An environment's frozen config dataclass from its task source's config.

    Raises: ValueError naming every unknown key, with the nearest names.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = []
    for key in cfg:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1) or names
            unknown.append(f"{key!r} (use {', '.join(near)})")
    if unknown:
        raise ValueError(f"unknown config keys of {cls.__qualname__}: {'; '.join(unknown)}")
    return cls(**cfg)
