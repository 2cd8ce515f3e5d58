"""`fa.warm`: compiles ahead what calls will need, in parallel processes.

What to build comes from manifests or from variants; `planner.reachable` lists every kernel that
calls of the same structure can ask for, whatever their lengths, so that a process that may not
compile misses none. What a layer has already is skipped before any process starts. The expensive
kernels are begun first, so that the workers end together.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

from ... import env
from ...codegen.spec import AnySpec, KernelSpec, name_of
from ...codegen.targets import is_cuda
from ...errors import CacheError, CompileError, InputError
from ...jit.cache.store import Store
from ...jit.compilation import toolchain
from ...jit.compilation.toolchain import find_compiler
from ...jit.module import find_prepared
from ...planner.tiles import build_requests
from ..wanted.specs import wanted_specs
from .pool import WorkerPool
from .progress import Progress, WarmEvent, display
from .report import KernelResult, WarmReport, kernel_words
from .worker import build, make_task

log = logging.getLogger(__name__)

# What a worker's result says of a kernel; it alone knows.
_TOLD = {f.name for f in fields(KernelResult)} - {"key"}
_LOOK_S = 0.2  # between looks at what is compiling
_UNPACK = "; or unpack a pack that has these kernels: flashattn-jit unpack FILE"


def warm(
    what: Any,
    *,
    head_dims: Any = (),
    dtypes: Any = (),
    targets: str | Sequence[str] = (),
    formats: Sequence[str] | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    params: Mapping[str, object] | None = None,
    kv_format: Any = None,
    v_in_k: bool = False,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress = True,
    strict: bool = True,
    allow_cpp: bool = False,
) -> WarmReport:
    """Builds every kernel that calls like these can need, and that no layer of the cache has.

    Args:
        what: a manifest's path ("-" is standard input), a variant, a bare score_mod or mask_mod,
            the name of a library variant, a `Line` or a kernel spec; or several of them. A manifest
            stands for what it recorded and for the same calls with other lengths.
        head_dims: for variants: 64, or "576/512" where v differs; several as [64, (576, 512)].
        dtypes: for variants: torch dtypes or names, "bf16/int8" for keys and values of another
            dtype than the queries'; one or several.
        targets: "cpu:avx2", "sm_90", ..., "host", "cpu", "cuda" or "all"; none of them need run
            here. By default a manifest's own targets, and for variants "host".
        formats: for variants: the kinds of calls, "dense", "block_mask", "ragged", "paged",
            "sparse", "cascade", "tree", "bits", "block_bits", "max_scores" or "append". All by
            default.
        num_q_heads: for variants whose params have defaults that depend on it.
        num_kv_heads: likewise.
        params: for variants: values of params without a default. Their dtypes, ranks and strides
            count, their values and sizes do not.
        kv_format: for variants: an `fa.kv.Format` of keys and values, or a pair of one for k and
            one for v, None for values as they are: kernels of calls on `fa.kv.Stored`, of appends
            into it, and of its levels in a cascade. `dtypes` then says the queries'. Scales are
            expected with the strides that `Format.quantize` and `fa.kv.Cache` give them; give
            num_q_heads and num_kv_heads where there is one KV head.
        v_in_k: for variants: kernels of batches and cascades with v_in_k, and no others.
        jobs: kernels compiled at a time; as many as there are cores by default.
        executor: a `concurrent.futures.Executor` to build in, such as a pool over many machines,
            instead of processes of this one. Its workers import this package, build in caches of
            their own and send the entries back. It is not shut down.
        progress: True shows a bar on a terminal and lines elsewhere, on standard error; a function
            is called with each `WarmEvent`; False shows nothing.
        strict: raise at the end where kernels failed. Else the report says so.
        allow_cpp: manifests may hold hooks that were given as C++ text: see `read_manifest`.

    Returns:
        What became of each kernel. Under FLASHATTN_JIT_COMPILE=never nothing is compiled: what is
        missing counts as failed, which checks a cache.

    Raises:
        WarmError: kernels failed, with `strict`; all others were built. Its `report` says which.
        InputError, ManifestError: an argument or a manifest is wrong; nothing was built.
        ParamError, TraceError, TargetError, CacheError: likewise.

    Ended by Ctrl-C it stops its workers and their compilers; what was built by then stays.

    Example:
        >>> fa.warm("m.jsonl", targets=("cpu:avx2", "sm_90"), jobs=8)
        >>> fa.warm(fa.Causal(), head_dims=(64, 128), dtypes="bf16", targets="all")
        >>> fa.warm(fa.Causal(), head_dims=128, dtypes="bf16", kv_format=fa.kv.Format("int8"))
    """
    begin = time.perf_counter()
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise InputError(f"jobs must be an int of at least 1, got {jobs!r}")
    if (num_q_heads is None) != (num_kv_heads is None):
        raise InputError("give num_q_heads and num_kv_heads both, or neither")
    heads = None
    if num_q_heads is not None:
        from ...ops.arguments.checks import check_int  # imports torch, which manifests need not

        heads = check_int("num_q_heads", num_q_heads, 1), check_int("num_kv_heads", num_kv_heads, 1)
        if heads[0] % heads[1]:
            raise InputError(f"num_kv_heads={heads[1]} does not divide num_q_heads={heads[0]}")
    specs = wanted_specs(
        what, head_dims=head_dims, dtypes=dtypes, targets=targets, formats=formats, heads=heads,
        params=params, kv_format=kv_format, v_in_k=v_in_k, allow_cpp=allow_cpp,
    )  # fmt: skip
    done, missing = _look_up(specs)
    never = env.compile_mode() == "never"  # executors' processes need not know it
    if executor is None or never:
        refusals = {spec.target: _refusal(spec.target) for spec, _ in missing}
        done += [replace(one, **why) for _, one in missing if (why := refusals[one.target])]
        missing = [task for task in missing if not refusals[task[1].target]]
    missing.sort(key=lambda task: -_cost(task[0]))
    workers = min(jobs or len(os.sched_getaffinity(0)), len(missing))
    store = Store(env.cache_dir())
    done += _build_all(missing, len(done), workers, executor, store, progress)
    done.sort(key=lambda r: (r.name, r.target, r.kernel, r.key))
    wall_s = time.perf_counter() - begin
    notes = _notes(done, store) if executor else ()
    report = WarmReport(tuple(done), 0 if executor else workers, wall_s, str(store.root), notes)
    if strict:
        report.raise_for_failures()
    return report


_Task = tuple[AnySpec, KernelResult]
"""A kernel that is to be built, and what its result is made of."""


def _look_up(specs: Iterable[AnySpec]) -> tuple[list[KernelResult], list[_Task]]:
    """What layers have, and what is left to build."""
    found: list[KernelResult] = []
    missing: list[_Task] = []
    fresh = env.compile_mode() == "always"
    for spec in specs:
        requests = build_requests(spec)
        key, words = toolchain.key_of(requests[0]).hex, kernel_words(json.loads(requests[0].spec))
        one = KernelResult(key, name_of(spec), spec.target, words)
        if fresh or (prepared := find_prepared(requests)) is None:
            missing.append((spec, one))
        else:
            size = prepared.found.artifact_bytes
            one = replace(one, tile=prepared.tile, layer=prepared.found.layer)
            found.append(replace(one, artifact_bytes=size))
    return found, missing


def _refusal(target: str) -> dict[str, Any]:
    """Why no process of this machine can build for a target; empty where one can."""
    if env.compile_mode() == "never":
        words = "it is in no layer, and FLASHATTN_JIT_COMPILE=never forbids to compile it"
        return {"error": words, "error_type": "MissingKernelError"}
    if find_compiler(target) is not None:
        return {}
    remedy = _UNPACK if is_cuda(target) else ""
    return {"error": toolchain.missing_compiler(target) + remedy, "error_type": "CompileError"}


def _cost(spec: AnySpec) -> float:
    """What a compile takes, roughly: it decides the order only."""
    if not isinstance(spec, KernelSpec):
        return 1.0
    hooks = len(spec.document()) / 4000
    size = max(spec.head_dim, spec.head_dim_v) / 128
    return (3.0 if is_cuda(spec.target) else 1.5) + size + hooks + len(spec.features) / 4


def _build_all(
    tasks: Sequence[_Task],
    before: int,
    workers: int,
    executor: Executor | None,
    store: Store,
    progress: Progress,
) -> list[KernelResult]:
    """What became of the tasks. before: how many kernels are there or failed already."""
    results: list[KernelResult] = []
    if not tasks:
        return results
    total = before + len(tasks)
    pending: dict[Future[dict[str, Any]], KernelResult] = {}
    own_pool = nullcontext(executor) if executor is not None else WorkerPool(workers)
    with display(progress, total) as show, own_pool as pool:

        def tell(finished: KernelResult | None) -> None:
            running = [one for future, one in pending.items() if future.running()]
            words = tuple(f"{one.name} {one.kernel} {one.target}" for one in running)
            show(WarmEvent(before + len(results), total, words, finished))

        try:
            for spec, one in tasks:
                text = make_task(spec.document(), one.name, ship=executor is not None)
                pending[pool.submit(build, text)] = one
            while pending:
                finished, _ = wait(pending, _LOOK_S, FIRST_COMPLETED)
                for future in finished:
                    one = pending.pop(future)
                    results.append(_result(one, future, store, executor is not None))
                    tell(results[-1])
                if not finished:
                    tell(None)
        finally:
            for future in pending:  # after an error
                future.cancel()
    return results


def _result(
    one: KernelResult, future: Future[dict[str, Any]], store: Store, shipped: bool
) -> KernelResult:
    told: dict[str, Any] = {}
    try:
        result = future.result()
        for warning in result.get("warnings", ()):
            log.warning("%s", warning)
        told = {"seconds": result["seconds"], "host": result["host"]}
        if shipped and "error" in result:
            result["log_path"] = _kept_log(one, result, store)
        elif shipped:
            _adopt(one, result, store)
            if result["layer"] != "compiler":
                result["layer"] = "executor"
        return replace(one, **{name: value for name, value in result.items() if name in _TOLD})
    except (Exception, CancelledError) as error:
        # Whatever an executor raises: the other kernels are built all the same.
        words = str(error) or repr(error)
        return replace(one, error=words, error_type=type(error).__name__, **told)


def _adopt(one: KernelResult, result: dict[str, Any], store: Store) -> None:
    """Puts the entries that came with a result into this machine's cache."""
    if result["key"] != one.key:
        raise CompileError(
            f"the worker on {result['host']} has another version of flashattn_jit, whose kernels "
            "this one cannot use; install the same version there"
        )
    if not any(entry["key"] == one.key for entry in result["entries"]):
        raise CacheError(
            f"the worker on {result['host']} could not keep the kernel; give it a "
            "FLASHATTN_JIT_CACHE_DIR that it can write to"
        )
    for entry in result["entries"]:
        store.adopt(entry["key"], entry["compiler_id"], entry["files"], entry["meta"])


def _kept_log(one: KernelResult, result: dict[str, Any], store: Store) -> str:
    """The log of a build on another machine, kept on this one."""
    if not result.get("log"):
        return ""
    try:
        with store.staging() as staging:
            staging.joinpath(toolchain.LOG).write_text(result["log"])
            return str(store.keep_failure(staging, one.key) / toolchain.LOG)
    except (OSError, CacheError):
        return ""


def _notes(results: Sequence[KernelResult], store: Store) -> tuple[str, ...]:
    """What the results do not say: kernels that this machine itself will not look for."""
    notes = []
    for target in sorted({r.target for r in results if r.compiler_id}):
        compiler = find_compiler(target)
        own = toolchain.identify(compiler, store.recall_compiler).id if compiler else None
        others = {r.compiler_id for r in results if r.target == target and r.compiler_id} - {own}
        if own and others:
            notes.append(
                f"kernels for {target} are of {', '.join(sorted(others))}; this machine has {own} "
                "and looks for its own unless FLASHATTN_JIT_COMPILE=never"
            )
    return tuple(notes)
