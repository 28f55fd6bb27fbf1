"""A process that offers arrays, a line each of what a puller must be told; it ends with its standard input."""

import json
import sys
import time

import jax
import numpy as np

from rl_jax.remote.store import Load
from rl_jax.remote.transfer import Offers

NUM_OFFERS = 3

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    offers = Offers()
    arrays = {"up": np.arange(1000, dtype=np.float32)}
    for bucket in range(NUM_OFFERS):
        load = Load("v3.1", 3, bucket, arrays, time.monotonic() + 60)
        print(json.dumps(offers.offer("decode.0", "127.0.0.1", load)), flush=True)
    sys.stdin.read()
