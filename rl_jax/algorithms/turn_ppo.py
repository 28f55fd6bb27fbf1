"""Turn-level PPO: GRPO's advantages, and the clip on one ratio a turn, the geometric mean of the turn's tokens.

Between GRPO (a token's ratio) and GSPO (a sequence's): one bad turn of a long episode is clipped alone.
Source: ROLL's segment ratio. Its clip range is the token's, ours GSPO's.
"""

from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.sequence_losses import turn_ppo
from rl_jax.algorithms.token_losses import TokenLoss


class TurnPpo(Grpo):
    def loss(self, x: LossInputs) -> TokenLoss:
        s = self.settings
        return turn_ppo(
            x, clip_low=s.clip_low, clip_high=s.clip_high, dual_clip=s.dual_clip or None
        )  # fmt: skip
