"""A service without a compiler: record what it runs, build it elsewhere, ship one file.

python examples/04_offline_image.py     (30 s: it compiles the service's kernels twice)
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import flashattn_jit as fa

Q_HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16


def serve():
    """A small service: one dense call, then a batch over pages, its prompts and its next tokens."""
    torch.manual_seed(0)
    variant = fa.SlidingWindow(64) & fa.SoftCap(30.0)
    q, (k, v) = torch.randn(1, Q_HEADS, 100, DIM), torch.randn(2, 1, KV_HEADS, 100, DIM)
    results = [fa.attention(q, k, v, variant)]
    batch = fa.BatchAttention(
        variant, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_dtype=torch.float32
    )
    k_pages, v_pages = torch.randn(2, 12, PAGE, KV_HEADS, DIM)
    for q_lens, last in ((70, 90), (6, 10)), ((1, 1), (7, 11)):  # prompts, then a token of each
        q_indptr = torch.tensor([0, *q_lens]).cumsum(0)
        paged = fa.Paged(torch.tensor([0, 6, 12]), torch.arange(12), torch.tensor(last), PAGE)
        batch.plan(q_indptr, paged)
        results.append(batch.run(torch.randn(sum(q_lens), Q_HEADS, DIM), k_pages, v_pages))
    return results


def image():
    """What runs in the image: the service, then a call that was not recorded."""
    print(f"  sums {[round(float(r.sum()), 3) for r in serve()]}")
    print(*(f"  {line}" for line in str(fa.cache_info()).splitlines()), sep="\n")
    try:
        fa.attention(*torch.randn(3, 1, 2, 8, 48).half())
    except fa.MissingKernelError as error:
        print(*(f"  {line[:140]}" for line in str(error).splitlines()), sep="\n")


def run_image(layer):
    """A process that has the layer and nothing else: no compiler, no cache, no home."""
    environment = {
        "PATH": "", "FLASHATTN_JIT_COMPILE": "never", "FLASHATTN_JIT_CACHE_PATH": str(layer),
        "FLASHATTN_JIT_CACHE_DIR": "/nonexistent/cache", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    subprocess.run([sys.executable, __file__, "image"], env=environment, check=True)


def main(folder):
    """Record, warm, pack; then serve from the pack in two ways."""
    manifest, archive, layer = folder / "service.jsonl", folder / "kernels.pack", folder / "layer"
    with fa.record_manifest(manifest):  # where the service runs today
        expected = serve()
    print(f"recorded {len(manifest.read_text().splitlines())} kernels of the service")

    os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(folder / "builder")  # a builder: no GPU is needed
    print(fa.warm(manifest))
    print(fa.pack(archive, manifest=manifest))
    print(fa.unpack(archive, layer))
    for path in (layer, *layer.rglob("*")):
        path.chmod(path.stat().st_mode & 0o555)
    print(f"the image should print sums {[round(float(r.sum()), 3) for r in expected]}")
    for what in (layer, archive):
        print(f"serving from {what.name}, read-only, without a compiler:", flush=True)
        run_image(what)


if sys.argv[1:] == ["image"]:
    image()
else:
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
