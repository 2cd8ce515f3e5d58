"""Mistakes that a tired engineer could make, and the tests that must notice each of them.

`python -m tests.full.planted_mistakes` plants them, one at a time, in a private copy of the
checkout (`planting.py`), and prints a table of what caught them; names or parts of names choose
some. A mistake that stays unnoticed is a missing test. Mistakes in CUDA kernels that the emulator
must find are in tests/emulator/test_mutants.py and test_batch_mutants.py as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mistake:
    """`new` stands in the place of `old`, which `file` has once.

    wrong: what goes wrong then. tests: the folder or file of tests that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    wrong: str
    tests: str


VARIANTS, OPS = "flashattn_jit/variants", "flashattn_jit/ops"
JIT, DEPLOY = "flashattn_jit/jit", "flashattn_jit/deploy"
CPU, CUDA = "csrc/include/fajit/cpu", "csrc/include/fajit/cuda"

PYTHON = (
    # Variants: tracing, captures, interval form, library
    Mistake("reflected division", f"{VARIANTS}/trace_ops.py",
            'return _integer_division("floordiv", other, input)',
            'return _integer_division("floordiv", input, other)',
            "`7 // kv_idx` in a hook divides the other way round.",
            "tests/variants/test_trace_ops.py"),
    Mistake("uint8 and int8", f"{VARIANTS}/promotion.py",
            'return "int16" if other == "int8" else other', "return other",
            "A sum of uint8 and int8 wraps at 127.",
            "tests/variants/test_trace_make_fx.py"),
    Mistake("type of a captured number", f"{VARIANTS}/captures.py",
            'self.guard(f"type({var}) is not {self.const(type(value))}")\n        if self.frozen:',
            "if self.frozen:",
            "A captured int that becomes a float is read as an int.",
            "tests/variants/test_captures.py"),
    Mistake("remainder over a period", f"{VARIANTS}/intervals.py",
            "return np.where(same, a[0] - start, 0), np.where(same, a[1] - start, b[0] - 1)",
            "return a[0] - start, np.where(same, a[1] - start, b[0] - 1)",
            "A range that crosses a multiple of the divisor seems to hold no small remainders.",
            "tests/variants/test_bounds_by_hooks.py"),
    Mistake("tables of a tensor written to", f"{VARIANTS}/range_table.py",
            "version = (tensor._version, tensor.data_ptr(),", "version = (tensor.data_ptr(),",
            "The extremes of a tensor stay those of before it was written to.",
            "tests/variants/test_range_table.py"),
    Mistake("order of composed hooks", f"{VARIANTS}/compose.py",
            "return second(first(x, *rest), *rest)", "return first(second(x, *rest), *rest)",
            "`a & b` applies b's score_mod before a's.",
            "tests/variants/test_compose.py"),
    Mistake("window one too wide", f"{VARIANTS}/library/masks.py",
            "(q_idx - kv_idx < self.window)", "(q_idx - kv_idx <= self.window)",
            "StreamingLLM keeps one key more than its window.",
            "tests/variants/test_library_masks.py"),
    Mistake("slopes of other head counts", f"{VARIANTS}/library/biases.py",
            "powers(2 * closest)[0::2]", "powers(2 * closest)[1::2]",
            "ALiBi of 12 heads gets slopes that it has already.",
            "tests/variants/test_library_biases.py"),
    # Ops: checks, normalisation of arguments, sparsity, levels
    Mistake("checks by shapes alone", f"{OPS}/_call.py",
            "q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype",
            "q.shape, k.shape, v.shape, q.dtype",
            "A transposed tensor passes after a contiguous one of its shape did.",
            "tests/ops/test_bad_input.py"),
    Mistake("plans of another window", f"{OPS}/_attend.py",
            "bound.scalars if known.schedule_reads_scalars else None,", "None,",
            "A call runs the plan of a window of another width, which leaves out keys.",
            "tests/ops/test_call_plans.py"),
    Mistake("heads of other blocks", f"{OPS}/_batch_plan.py",
            "        num_kv_heads = options.num_q_heads", "        num_kv_heads = num_kv_heads",
            "Heads that visit different blocks of a block mask share a tile.",
            "tests/ops/test_call_plans.py"),
    Mistake("heads without enable_gqa", f"{OPS}/sdpa.py",
            "if enable_gqa or heads[0] == heads[1] == heads[2]:",
            "if enable_gqa or heads[1] == heads[2]:",
            "Heads of q and k that differ pass without enable_gqa.",
            "tests/ops/test_sdpa.py"),
    Mistake("a tree's first draft token", f"{OPS}/_bits.py",
            "kept: Tensor = (kv_idx < prefix) |", "kept: Tensor = (kv_idx <= prefix) |",
            "Every row of a tree sees the first draft token.",
            "tests/batch"),
    Mistake("last page of a divided level", f"{OPS}/_level_pages.py",
            "(last - 1) % size + 1", "last % size",
            "A full last page of a level that is divided into smaller ones has no keys.",
            "tests/ops/test_cascade.py"),
    # Planner and code generation
    Mistake("cascades that share nothing", "flashattn_jit/planner/reachable.py",
            'alone = ("ragged", "paged") if "cascade" in formats else ()', "alone = ()",
            "Warming cascades leaves out the kernels of steps that share nothing.",
            "tests/planner/test_reachable.py"),
    Mistake("few rows at the border", "flashattn_jit/planner/tiles.py",
            "if packed_rows <= few_rows(target, q_dtype)",
            "if packed_rows < few_rows(target, q_dtype)",
            "Exactly as many rows as the few-row kernel serves get the prefill kernel.",
            "tests/planner/test_tiles.py"),
    Mistake("features that exclude each other", "flashattn_jit/codegen/document.py",
            'if "sparse" in value and {"block_mask", "mixed_rows"} & set(value):',
            'if "sparse" in value and {"block_mask", "mixed_rows"} <= set(value):',
            "A manifest may ask for kernels of lists that have a block mask too.",
            "tests/codegen/test_document.py"),
    # Cache: keys, locks, trust, eviction, look-up
    Mistake("order of flags", f"{JIT}/key.py",
            '("flags", "\\n".join(flags)),', '("flags", "\\n".join(sorted(flags))),',
            "Kernels compiled with the same flags in another order share a key.",
            "tests/jit/test_key.py"),
    Mistake("shared build locks", f"{JIT}/locks.py",
            "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
            "Every process that wants a kernel builds it at the same time.",
            "tests/jit/test_locks.py"),
    Mistake("folders of a group", f"{JIT}/trust.py",
            "_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH", "_OTHERS_WRITE = stat.S_IWOTH",
            "Code is loaded from folders that a group may write to.",
            "tests/jit/test_store.py"),
    Mistake("oldest instead of least used", f"{JIT}/eviction.py",
            "used=max(decisive.st_atime, decisive.st_mtime)", "used=decisive.st_mtime",
            "A full cache removes the kernels that were built first, used or not.",
            "tests/jit/test_eviction.py"),
    Mistake("no second look under the lock", f"{JIT}/resolve.py",
            "            found = self._search(wanted, local_layers(), [])\n"
            "            if found is None:\n"
            "                found = self._search(wanted, remote_layers(), [])",
            "            found = self._search(wanted, remote_layers(), [])",
            "Threads that wait for a build make the kernel again when it is done.",
            "tests/jit/test_module.py"),
    # Deployment, inspection, integrations
    Mistake("newest of several builds", f"{DEPLOY}/pack.py",
            "if other is None or entry.created > str(", "if other is None or entry.created < str(",
            "Of a kernel that two compilers made, the oldest build is packed.",
            "tests/deploy/test_pack.py"),
    Mistake("one wrong row", "flashattn_jit/inspect/_error.py",
            "if (excess > 0).any():", "if (excess > 0).all():",
            "verify() accepts a result with one wrong row among many.",
            "tests/inspect/test_error.py"),
    Mistake("offset of a layer's keys", "flashattn_jit/integrations/_lazy_mask.py",
            "self.q_offset = q_offset - kv_offset", "self.q_offset = q_offset",
            "Sliding layers of transformers models mask by positions that are counted twice.",
            "tests/integrations"),
    Mistake("ALiBi of Falcon unscaled", "flashattn_jit/integrations/_own_attention.py",
            "alibi.view(query.shape[0], layer.num_heads, 1, -1) * layer.inv_norm_factor",
            "alibi.view(query.shape[0], layer.num_heads, 1, -1)",
            "Falcon's ALiBi is added to scores that are scaled already.",
            "tests/integrations/test_transformers.py"),
    Mistake("a layer without a mask", "flashattn_jit/integrations/transformers.py",
            "return bool(is_causal) and q_len > 1", "return q_len > 1",
            "A layer without a mask is causal whatever it says.",
            "tests/integrations/test_transformers.py"),
    Mistake("unknown keyword argument", "flashattn_jit/integrations/transformers.py",
            "if name not in _WITHOUT_EFFECT and value is not None and value is not False:",
            "if name in ():",
            "What a family asks for in an argument of its own is left out in silence.",
            "tests/integrations"),
    Mistake("attention weights by a decorator", "flashattn_jit/integrations/transformers.py",
            'if kwargs.get("output_attentions") or _weights_are_collected():',
            'if kwargs.get("output_attentions"):',
            "output_attentions=True returns an empty tuple.",
            "tests/integrations/test_families.py"),
)  # fmt: skip

RUNTIME = (
    Mistake("splits from the first key on", "csrc/scheduler/balance.cpp",
            "unit.origin + ((int64_t{part.kv_begin} - unit.origin) / split + 1) * split;",
            "int64_t{part.kv_begin} + split;",
            "Batch-invariant splits depend on the first key that the mask shows.",
            "tests/planner/test_batch_masks.py"),
    Mistake("states of the first row", "csrc/scheduler/merges.cpp",
            "first + cover.first_row + i * units[u].rows()", "first + i * units[u].rows()",
            "Every request of a shared level merges the states of the first one.",
            "tests/planner/test_batch_plan.py"),
    Mistake("the last row's keys", "csrc/scheduler/extents.cpp",
            "call_.q_end = last + 1;", "call_.q_end = last;",
            "Keys that only the last row of a tile sees are planned for nobody.",
            "tests/planner/test_batch_masks.py"),
    Mistake("an empty last page", "csrc/scheduler/lengths.cpp",
            "last < (pages > 0 ? 1 : 0)", "last < 0",
            "last_page_len=0 of a request with pages is taken for a full page fewer.",
            "tests/planner/test_batch_lengths.py"),
    Mistake("rows of two blocks", "csrc/scheduler/units.cpp",
            "options_.row_block > 0 ? options_.row_block : queries_len;", "queries_len;",
            "An item has rows of two blocks of a block mask.",
            "tests/planner/test_schedule.py"),
    Mistake("keys that k does not have", "csrc/scheduler/lengths.cpp",
            "kv_len[b] < 0 || kv_len[b] > kv_rows", "kv_len[b] < 0",
            "A dense call may have more keys than rows of k.",
            "tests/planner/test_batch_lengths.py"),
    Mistake("work of another batch", "csrc/runtime/batch_work.cpp",
            "return p.lengths_id == lengths_->id && p.num_q_heads", "return p.num_q_heads",
            "A plan of other lengths is run unchecked.",
            "tests/jit/test_runtime_batch.py"),
    Mistake("rows of one head", "csrc/runtime/work_checks.h",
            "int64_t{args.q_len[item.request]} * item.head_count;",
            "int64_t{args.q_len[item.request]} * group_size;",
            "Work of one head may name the rows of a whole group.",
            "tests/jit/test_runtime.py"),
    Mistake("children that never ran threads", "csrc/runtime/fork_guard.cpp",
            "stranded = opened;", "stranded = true;",
            "A process that was forked before any call is refused.",
            "tests/ops/test_fork.py"),
    Mistake("a state without keys", "csrc/runtime/merge_states.cpp",
            "    if (lse == kMinusInf) continue;\n", "",
            "NaN in the output of a state without keys reaches the merged one.",
            "tests/ops/test_varlen.py"),
    Mistake("counters of two launches", "csrc/runtime/cpu_team.cpp",
            "counters_.of((launch > 0 ? launches_[0].args.num_workers : 0) + int64_t{list})",
            "counters_.of(int64_t{list} + 0 * launch)",
            "Prefill and few-row items of a batch are claimed by one counter.",
            "tests/batch"),
)  # fmt: skip

KERNELS = (
    Mistake("hidden pairs of sigmoids", f"{CPU}/softmax.h",
            "splat(Hooks::kPointwise ? 0.0f : -kInf)", "splat(-kInf)",
            "A masked pair adds -inf to a pointwise sum.",
            "tests/ops/test_shared_code.py"),
    Mistake("rows without keys in splits", f"{CPU}/merge.h",
            "const float base = top == -kInf ? 0.0f : top;", "const float base = top;",
            "A row that sees no key in any split is NaN.",
            "tests/batch/test_edges.py"),
    Mistake("a run like its first tile", f"{CPU}/kv_walk.h",
            "run_state_ = classify(at_, run_end_);", "run_state_ = classify(at_, stop);",
            "A mask is not applied to tiles that follow a full or empty one.",
            "tests/batch/test_edges.py"),
    Mistake("slots of the next page", f"{CPU}/key_rows.h",
            "      slot = 0;\n", "",
            "Keys after the first page of a tile are read from the middle of their pages.",
            "tests/batch/test_edges.py"),
    Mistake("a sink above all scores", f"{CPU}/state.h",
            "return {n.factor * kept, n.lse};", "return {n.factor, n.lse};",
            "A sink larger than every score does not shrink the output.",
            "tests/ops/test_shared_code.py"),
    Mistake("greater at equality", "csrc/include/fajit/interval_real.h",
            "return {a.hi > b.lo, a.lo > b.hi &&", "return {a.hi > b.lo, a.lo >= b.hi &&",
            "A tile where x > y fails at equality counts as full.",
            "tests/variants/test_bounds_lower.py"),
    Mistake("remainders of negative numbers", f"{CPU}/hook_ops.h",
            "return m != 0 && ((m < 0) != (b < 0)) ? m + b : m;", "return m;",
            "`x % n` of a negative x has the sign of x.",
            "tests/codegen/test_hook_ops.py"),
    # CUDA, found by the emulator
    Mistake("empty blocks inside a tile", f"{CUDA}/attention/scores.h",
            "maybe = inside && state == FAJIT_TILE_PARTIAL;", "maybe = inside;",
            "Keys of an empty block are seen where a tile holds keys of others too.",
            "tests/cuda/test_features.py"),
    Mistake("units of the lse", f"{CUDA}/attention/state.h",
            "(top2 + ptx::log2_approx(sum)) * kLn2}", "top2 + ptx::log2_approx(sum) * kLn2}",
            "The lse adds a base-2 maximum to a natural logarithm.",
            "tests/cuda/test_features.py"),
    Mistake("an empty state on a device", f"{CUDA}/utility/merge_states.h",
            "        if (lse == minus_inf) continue;\n", "",
            "NaN in the output of a state without keys reaches the merged one.",
            "tests/ops/test_emulated.py"),
    Mistake("pages that do not exist", f"{CUDA}/utility/append_paged_kv.h",
            "if (page < 0 || page >= p.num_pages) continue;", "if (page < 0) continue;",
            "Appending writes behind the cache where a table names a page past its end.",
            "tests/ops/test_append.py"),
)  # fmt: skip

EMULATOR = (
    Mistake("reads of later warps", "csrc/emulator/races.cpp",
            "for (uint32_t other = 0; races_ && other < warps_; ++other) {",
            "for (uint32_t other = 0; races_ && other < warp; ++other) {",
            "A write is no race with a read of a warp of a higher number.",
            "tests/emulator/test_checks.py"),
    Mistake("one copy too many", "csrc/emulator/copies.cpp",
            "copy.group + pending < warp.committed[copy.lane]",
            "copy.group + pending <= warp.committed[copy.lane]",
            "A wait performs the copies of a group that it does not wait for.",
            "tests/emulator/test_checks.py"),
    Mistake("shifts by the width", "csrc/emulator/ops_bits.cpp",
            "return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);",
            "return static_cast<T>(a << (n & (8 * sizeof(T) - 1)));",
            "A shift by 32 leaves the value as it is.",
            "tests/emulator/test_arithmetic.py"),
)  # fmt: skip

MISTAKES = (*PYTHON, *RUNTIME, *KERNELS, *EMULATOR)


if __name__ == "__main__":
    from tests.full.planting import main

    main()
