"""convert holds one shard of a model and not the model: peak memory of processes of their own."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from rl_jax.models import hf, hf_config
from rl_jax.models.decoder import build_model
from rl_jax.models.hf_files import write_json, write_weights
from rl_jax.settings import ModelSettings
from tests.models.gguf_file import BPE_TOKENS, write_gguf

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
SHARD, WHOLE = 16 * MB, 2048 * MB
VOCAB = 300

# Converts one after the other and tells the peak of each, and what stays after it. What was freed is given back first,
# and the peak forgotten: on some interpreters 40 MB of the heap are free after the first, which would hide as much of
# what comes. VmHWM is of this program alone; ru_maxrss also knows the process that started it.
CHILD = """
import ctypes
import gc
import sys
from pathlib import Path
from rl_jax.tools import convert

def give_back():
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)

for src, dst, shard in zip(*[iter(sys.argv[1:])] * 3):
    Path("/proc/self/clear_refs").write_text("5")
    if convert.run(Path(src), Path(dst), dtype="bfloat16", max_shard_bytes=int(shard)):
        sys.exit(1)
    give_back()
    with open("/proc/self/status") as status:
        said = dict(line.split(":", 1) for line in status)
    print("bytes", *(int(said[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")))
"""


def write_sources(directory: Path, num_layers: int, size: int) -> int:
    """A model in shards of bfloat16 and, beside it, as a GGUF file of float16; how many bytes each has."""
    settings = ModelSettings(
        num_layers=num_layers, embed_size=size, num_heads=size // 64, num_kv_heads=size // 64,
        head_dim=64, mlp_size=4 * size, max_context=256,
    )  # fmt: skip
    specs = hf.specs(build_model(settings, VOCAB), jnp.bfloat16)
    rng = np.random.default_rng(0)
    # One array a shape: drawing them all would take longer than what is measured.
    drawn = {
        shape: rng.standard_normal(shape, np.float32).astype(dtype)
        for dtype, shape in dict.fromkeys(specs.values())
    }
    arrays = {name: drawn[shape] for name, (_, shape) in specs.items()}
    config = hf_config.config_of(settings, VOCAB)
    directory.mkdir()
    write_json(directory / "config.json", config)
    write_weights(directory, specs, arrays.items(), SHARD)
    kinds = {name: Kind.F16 for name, array in arrays.items() if array.ndim == 2}
    write_gguf(directory.with_suffix(".gguf"), config, arrays, kinds=kinds)
    return sum(array.nbytes for array in arrays.values())


def memory(*conversions: tuple[Path, Path, int]) -> list[tuple[int, int]]:
    """Bytes at the peak, and after it, of each (source, directory to write, size of a shard), in one process."""
    words = [sys.executable, "-c", CHILD, *(str(word) for one in conversions for word in one)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("bytes ")]
    return [(int(peak), int(after)) for _, peak, after in lines]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_convert_holds_one_shard(tmp_path):
    assert len(BPE_TOKENS) < VOCAB
    write_sources(tmp_path / "tiny", num_layers=1, size=64)
    size = write_sources(tmp_path / "big", num_layers=32, size=384)  # tensors of 1 MB at most
    assert size > 8 * SHARD
    (_, base), (hf_peak, _), (gguf_peak, _), (whole_peak, _) = memory(
        (tmp_path / "tiny.gguf", tmp_path / "a", SHARD),
        (tmp_path / "big", tmp_path / "b", SHARD),
        (tmp_path / "big.gguf", tmp_path / "c", SHARD),
        (tmp_path / "big", tmp_path / "d", WHOLE),
    )
    # Beside the shard: one tensor as it was read, in float32, and rounded.
    told = f"{(hf_peak - base) / MB:.0f} MB, and {(gguf_peak - base) / MB:.0f} from GGUF"
    assert hf_peak - base < 2 * SHARD and gguf_peak - base < 2 * SHARD, told
    # And these figures would tell of a conversion that held the model.
    assert whole_peak - base > 0.9 * size, f"{(whole_peak - base) / MB:.0f} MB"
    print(told, f"{(whole_peak - base) / MB:.0f} MB in one")
    assert [len(list((tmp_path / n).glob("*.safetensors"))) for n in "bcd"] == [10, 10, 1]
