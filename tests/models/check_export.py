"""Logits of a Hugging Face directory by transformers and by numpy: python tests/models/check_export.py DIR [IDS ...]

By hand, in an environment with torch and transformers (neither is a dependency): the directory must load there without
a missing or unexpected weight, and give the logits that numpy_reader.py gives. Loads a tokenizer too, if there is one.
"""

import sys
from pathlib import Path

import numpy as np


def main(directory, *ids):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(Path(__file__).parent))
    from numpy_reader import NumpyModel

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    loading = {key: sorted(value) for key, value in info.items() if value}
    assert not loading, loading
    tokens = [int(i) for i in ids] or np.linspace(0, model.config.vocab_size - 1, 24).astype(int).tolist()  # fmt: skip
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    ours = NumpyModel(directory, np.float32).logits(tokens)
    print(
        f"{model.config.model_type}: {len(tokens)} positions, logits up to {np.abs(theirs).max():.2f}"
    )
    print(f"greatest difference of transformers and numpy: {np.abs(theirs - ours).max():.2e}")
    if (Path(directory) / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        text = tokenizer.decode(tokenizer("Hello, world!\n")["input_ids"])
        print(
            f"tokenizer: {len(tokenizer)} tokens, {text!r}, template {bool(tokenizer.chat_template)}"
        )
    assert np.abs(theirs - ours).max() < 2e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
