"""Mistakes planted in the wgmma kernels are found in some order of their asynchronous operations,
and none in the unchanged kernels, whose bits depend on no order.

See tests/emulator/mutants.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashattn_jit import env
from flashattn_jit.errors import EmulatorFault
from flashattn_jit.jit import module
from flashattn_jit.jit.cache import entry
from flashattn_jit.jit.emulator.library import library
from tests.emulator.mutants import (
    SOURCE,
    Mutant,
    check_texts,
    kinds_that_run,
    mutated_headers,
    plant,
    run_mutated,
)
from tests.emulator.wgmma_calls import CALLS, few_workers  # noqa: F401
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc

pytestmark = [needs_nvcc, pytest.mark.usefixtures("few_workers")]

COPIES = "FLASHATTN_JIT_EMULATOR_COPIES"
MODES = ("late", "early", *(f"random:{seed}" for seed in range(4)))
SEEDS = range(200 if rotation.takes_all() else 20)

PREFILL, PRODUCER, RING = "wgmma/prefill.h", "wgmma/producer.h", "wgmma/ring.h"
PRODUCTS, MAPS, GROUP = "wgmma/products.h", "wgmma/maps.h", "ptx/warpgroup.h"
MBARRIER, LAYOUT = "ptx/mbarrier.h", "tile/panel_layout.h"
CHANGER, CHANGES = "wgmma/changer.h", "wgmma/changes.h"

FENCE, LANES, BLOCK = "ptx::fence_async_proxy();", "__syncwarp();", "__syncthreads();"
WAIT_ALL, MAY_RUN = "ptx::wait_products<0>();", "ptx::wait_products<1>();"
FENCED = f"{FENCE}\n    {LANES}"  # ends the changes of Q
SCORES_READ = f"{WAIT_ALL}\n    ptx::read_after_wait(s);"
OUTPUT_READ = f"{WAIT_ALL}\n      ptx::read_after_wait(o);"
RELEASE_K, RELEASE_V = "release(ring_.empty_keys(turn_));", "release(ring_.empty_values(before));"
SCALES, COUNTS = "if (units_.query != 1.0f)", "const int count = min(own_rows"
ARRIVES = "if (lane_ == 0) ptx::arrive"
ARRIVES_FOR_FOUR = "if (lane_ == 0 && warp_ % 4 == 0) ptx::arrive"
READS_RECORD = "return ring_.read_record(turn_);"
K_THERE = "ptx::wait(ring_.full_keys(turn_), Parts::phase(turn_));"
K_UNUSED = "ptx::wait(ring_.template unused<Keys>(turn_), Parts::phase(turn_) ^ 1);"
V_UNUSED = "ptx::wait(ring_.template unused<Values>(turn), Parts::phase(turn) ^ 1);"
Q_FREE = "release(ring_.empty_queries(group(), num_items_));"
Q_THERE = "ptx::wait(ring_.full_queries(group(), num_items_), Parts::query_phase(num_items_));"

SENT = "      send_values(before, turn_ - 1);\n    });"  # ends send_tiles
COPY_TO_NOBODY = """
    ptx::wait(ring_.empty_keys(turn_), Parts::phase(turn_) ^ 1);
    if (ptx::lane_index() == 0) ptx::arrive_for_copies(ring_.full_keys(turn_), bytes_of<Keys>());
    copy<Keys>(ring_.keys(turn_), params_.maps.k, ring_.full_keys(turn_), 0, 0, 0);"""

RECORDS = "if (Side::kKeys && first_ == 0) ring_.write_record(turn_, record);"
HANDED_ON = "ptx::arrive(ring_.template full<Side>(turn_));"
HAND_ON = f"if (ptx::lane_index() == 0) {{ {RECORDS} {HANDED_ON} }}\n"
COUNTED = "const int count = count_of(record);"
TAKEN = "if constexpr (Side::kCoded) ptx::arrive(ring_.template taken<Side>(turn_));"
LANDED = "ptx::wait(ring_.template landed<Side>(turn_), Parts::phase(turn_));"
DESCRIBED = "ptx::wait(ring_.described(turn), Parts::description_phase(turn));"
DESCRIBES = "ptx::arrive(ring_.described(turn_));"
LANDING_RECORD = "ring_.template write_record<Records::kLandings>(turn_, record);"
LANDING_OF_TURN = "kStages + kRuns + n % kLandings"

STUCK, FLIGHT, PROXY, ORDER = ("deadlock",), ("in flight",), ("proxy",), ("fence",)
VALUES, NAN, BOUNDS, EXIT = ("wrong",), ("NaN",), ("out of bounds",), ("exit",)
RACE = ("race", "in flight", "uninitialised")  # which of them depends on timing
LOST = (*RACE, *STUCK, "mbarrier", *VALUES, *NAN)  # phases or stages are out of step


MUTANTS = (
    # Fences of the asynchronous proxy
    plant("no proxy fence after Q is loaded", "causal", PROXY, PREFILL, FENCE, ""),
    Mutant("no proxy fence after Q is scaled", "negative scale", PROXY,
           ((PREFILL, FENCED, LANES, 0), (PREFILL, SCALES, FENCE + SCALES, 0))),
    Mutant("no proxy fence after query_mod", "query_mod", PROXY,
           ((PREFILL, FENCED, LANES, 0),
            (PREFILL, COUNTS, FENCE + COUNTS, 0))),
    plant("a proxy fence of one lane after Q is scaled", "negative scale", PROXY, PREFILL, FENCE,
          "if (lane_ == 0) " + FENCE),
    plant("a proxy fence of one lane after rows of V are cleared", "ragged", PROXY, PRODUCER, FENCE,
          "if (ptx::lane_index() == 0) " + FENCE),
    plant("no proxy fence after rows of V are cleared", "ragged", PROXY, PRODUCER, FENCE, ""),
    plant("rows of V cleared by lanes that have not met", "ragged", RACE, PRODUCER, FENCED, FENCE),
    plant("new barriers are not published", "causal", PROXY, MBARRIER,
          '"fence.mbarrier_init.release.cluster;"', '"//"'),
    # wgmma: fences, groups, waits
    plant("no wgmma.fence", "causal", ORDER, GROUP, '"wgmma.fence.sync.aligned;"', '"//"'),
    plant("no wgmma.fence in a step", "causal", ORDER, PREFILL,
          "factor[2];\n      ptx::start_products();", "factor[2];"),
    plant("products in no group", "causal", FLIGHT, GROUP,
          '"wgmma.commit_group.sync.aligned;"', '"//"'),
    plant("scores in no group", "causal", FLIGHT, PREFILL, "ptx::commit_products();", "", 2),
    plant("values in no group", "causal", FLIGHT, PREFILL, "ptx::commit_products();", "", 3),
    plant("scores read before the wait", "causal", FLIGHT, PREFILL, MAY_RUN, ""),
    plant("first scores may be in flight", "causal", FLIGHT, PREFILL, WAIT_ALL, MAY_RUN, 1),
    plant("the output may be in flight", "causal", FLIGHT, PREFILL, WAIT_ALL, MAY_RUN, 2),
    plant("weights overwritten before the wait", "sigmoid", FLIGHT, PREFILL, WAIT_ALL, "", 2),
    plant("the last output may be in flight", "causal", FLIGHT, PREFILL, WAIT_ALL, MAY_RUN),
    plant("packed rows written before the last product", "causal", FLIGHT, PREFILL, WAIT_ALL, ""),
    # Releases of stages
    # A step's release of K is no mistake before its wait: the producer waits for a later V first.
    plant("K released before the wait", "causal", RACE, PREFILL,
          f"{SCORES_READ}\n    {RELEASE_K}", RELEASE_K + SCORES_READ),
    plant("V released before the wait", "causal", RACE, PREFILL,
          f"{OUTPUT_READ}\n      {RELEASE_V}", RELEASE_V + OUTPUT_READ),
    plant("released by one warp for four", "causal", STUCK, PREFILL,
          ARRIVES, ARRIVES_FOR_FOUR),
    Mutant("released by one warp for four, which is counted", "causal", RACE,
           ((PREFILL, ARRIVES, ARRIVES_FOR_FOUR, 0),
            (RING, "? kConsumerWarps", "? kGroups", 0), (RING, ": ptx::kGroupWarps", ": 1", 0))),
    plant("released by all lanes", "causal", LOST, PREFILL, ARRIVES,
          "ptx::arrive"),
    # Barriers in shared memory
    plant("K announced with 16 bytes more", "causal", STUCK, PRODUCER, "bytes_of<Keys>());",
          "bytes_of<Keys>() + 16);"),
    plant("K announced with 16 bytes less", "causal", STUCK, PRODUCER, "bytes_of<Keys>());",
          "bytes_of<Keys>() - 16);"),
    plant("V announced with 16 bytes more", "causal", STUCK, PRODUCER, "bytes_of<Values>());",
          "bytes_of<Values>() + 16);"),
    plant("V announced with 16 bytes less", "causal", STUCK, PRODUCER, "bytes_of<Values>());",
          "bytes_of<Values>() - 16);"),
    plant("the parity of stages is not flipped", "causal", LOST, RING, "return turn / kStages & 1;",
          "return 0;"),
    plant("the parity is that of the turn", "causal", LOST, RING, "return turn / kStages & 1;",
          "return turn & 1;"),
    plant("the parity of empty K is not inverted", "causal", LOST, PRODUCER,
          "Parts::phase(turn_) ^ 1", "Parts::phase(turn_)"),
    plant("the parity of queries is not flipped", "many items", LOST, RING,
          "return n / kQueryStages & 1;", "return 0;"),
    plant("the parity of queries is that of the item", "many items", LOST, RING,
          "return n / kQueryStages & 1;", "return n & 1;"),
    plant("the consumers' parity of queries is not flipped", "many items", LOST, PREFILL,
          "Parts::query_phase(num_items_)", "0"),
    plant("all queries in one stage", "many items", RACE, RING,
          "return n % kQueryStages * QLayout::kBytes;", "return 0;"),
    plant("one barrier for both stages of queries", "many items", LOST, RING,
          "barrier(4 * kStages + n % kQueryStages * kGroups + group)",
          "barrier(4 * kStages + group)"),
    plant("the parity of cut tiles is not flipped", "ragged", LOST, PRODUCER, "num_cut_++ & 1",
          "0"),
    plant("one more warp releases a stage", "causal", STUCK, RING, "? kConsumerWarps",
          "? kConsumerWarps + 1"),
    plant("one warp less releases a stage", "causal", LOST, RING, "? kConsumerWarps",
          "? kConsumerWarps - 1"),
    plant("barriers made without a barrier of the block", "causal", ("race", "mbarrier"), PREFILL,
          BLOCK, ""),
    plant("K read before it is there", "causal", RACE, PREFILL,
          K_THERE, ""),
    plant("V read before it is there", "causal", RACE, PREFILL,
          "ptx::wait(ring_.full_values(before), Parts::phase(before));", ""),
    plant("the last V read before it is there", "causal", RACE, PREFILL,
          "ptx::wait(ring_.full_values(turn_ - 1), Parts::phase(turn_ - 1));", ""),
    plant("K waited for by one lane", "causal", RACE, PREFILL,
          "ptx::wait(ring_.full_keys(turn_)", "if (lane_ == 0) ptx::wait(ring_.full_keys(turn_)"),
    plant("V waited for by one warp of four", "causal", RACE, PREFILL,
          "ptx::wait(ring_.full_values(before)",
          "if (warp_ % 4 == 0) ptx::wait(ring_.full_values(before)"),
    plant("Q read before it is there", "causal", RACE, PREFILL,
          Q_THERE, ""),
    plant("Q announced before its copies are complete", "causal", RACE, PRODUCER,
          "ptx::arrive_after_copies(", "ptx::arrive("),
    plant("K copied over K in use", "causal", (*RACE, "mbarrier"), PRODUCER,
          K_UNUSED, ""),
    plant("V copied over V in use", "causal", (*RACE, "mbarrier"), PRODUCER,
          V_UNUSED, ""),
    plant("Q copied over Q in use", "many items", RACE, PRODUCER,
          "ptx::wait(ring_.empty_queries(group, n), Parts::query_phase(n) ^ 1);", ""),
    plant("Q released before the output is packed", "many items", RACE, PREFILL,
          "write_states(item, rows, softmax, o);\n    " + Q_FREE,
          Q_FREE + "write_states(item, rows, softmax, o);"),
    plant("rows cleared before V is there", "ragged", RACE, PRODUCER,
          "ptx::wait(ring_.landed(), num_cut_++ & 1);", ""),
    Mutant("V handed on before rows are cleared", "ragged", RACE,
           ((PRODUCER, "cuts ? ring_.landed() :", "false ? ring_.landed() :", 0),
            (PRODUCER, "ptx::wait(ring_.landed(), num_cut_++ & 1);",
             "ptx::wait(ring_.full_values(turn_), Parts::phase(turn_));", 0),
            (PRODUCER, "ptx::arrive(ring_.full_values(turn));", "{}", 0))),
    # Rows that are changed
    plant("no proxy fence after rows are changed", "codes", PROXY, CHANGER, FENCE, ""),
    plant("no proxy fence after key_mod", "rope", PROXY, CHANGER, FENCE, ""),
    plant("a proxy fence of one lane after rows are changed", "value_mod", PROXY, CHANGER, FENCE,
          "if (ptx::lane_index() == 0) " + FENCE),
    plant("rows handed on by lanes that have not met", "value_mod", RACE, CHANGER, FENCED, FENCE),
    *(
        Mutant(f"{what} handed on before rows are changed", call, RACE,
               ((CHANGER, HANDED_ON, "{}", 0), (CHANGER, COUNTED, HAND_ON + COUNTED, 0)))
        for what, call in (("codes", "codes"), ("values", "value_mod"))
    ),
    Mutant("handed on by one changer for four, which is counted", "codes", RACE,
           ((CHANGER, HANDED_ON, "if (first_ == 0) " + HANDED_ON, 0),
            (RING, ": of_changers                      ? ptx::kGroupWarps",
             ": of_changers ? i < 2 * kStages ? 1 : ptx::kGroupWarps", 0))),
    Mutant("codes released before they are read", "codes", RACE,
           ((CHANGER, TAKEN, "", 0),
            (CHANGER, COUNTED, f"if (ptx::lane_index() == 0) {TAKEN}\n{COUNTED}", 0))),
    plant("codes copied over codes in use", "codes", (*RACE, "mbarrier"), PRODUCER, K_UNUSED, ""),
    plant("values copied over values in use", "value_mod", (*RACE, "mbarrier"), PRODUCER, V_UNUSED,
          ""),
    *(
        plant(f"rows of {side} changed before they have landed, {call}", call, LOST, CHANGER,
              LANDED, f"if ({'!' * (side == 'V')}Side::kKeys) {{}} else {LANDED}")
        for call, side in (("codes", "K"), ("codes", "V"), ("codes of keys", "K"),
                           ("codes of values", "V"), ("rope", "K"), ("value_mod", "V"))
    ),
    plant("codes widened over rows in use", "codes", LOST, CHANGER,
          "ptx::wait(ring_.template empty<Side>(turn_), Parts::phase(turn_) ^ 1);", ""),
    *(
        mutant
        for call in ("codes", "codes of keys", "codes of values", "rope", "value_mod")
        for mutant in (
            plant(f"a changers' record read before it is there, {call}", call, LOST, CHANGER,
                  DESCRIBED, ""),
            Mutant(f"a changers' record announced before it is written, {call}", call, RACE,
                   ((PRODUCER, LANDING_RECORD, DESCRIBES, 0),
                    (PRODUCER, DESCRIBES, LANDING_RECORD, 1))),
            plant(f"a changers' record overwritten before it is read, {call}", call, RACE, RING,
                  LANDING_OF_TURN, "kStages + kRuns + n % kStages"),
        )
    ),
    plant("three records for changers of values", "codes of values", RACE, RING, LANDING_OF_TURN,
          "kStages + kRuns + n % (kStages + 1)"),
    plant("a barrier for two records of changers", "codes of keys", LOST, RING,
          "kDescribed + turn % kLandings", "kDescribed + turn % kStages"),
    plant("the parity of changers' records is not flipped", "codes of keys", LOST, RING,
          "return turn / kLandings & 1;", "return 0;"),
    plant("the parity of changers' records is that of stages", "codes of keys", LOST, RING,
          "return turn / kLandings & 1;", "return phase(turn);"),
    plant("changers' records are announced by all lanes", "codes of keys", LOST, PRODUCER,
          f"{LANDING_RECORD}\n        {DESCRIBES}\n      }}", f"{LANDING_RECORD} }}\n{DESCRIBES}"),
    plant("changers' records are announced by no lane", "codes of keys", STUCK, PRODUCER, DESCRIBES,
          ""),
    plant("no tile is the changers' last", "value_mod", LOST, PRODUCER, "describe(record);",
          "describe({record.tile, false, false});"),
    plant("an item without keys is not described", "codes of keys", STUCK, PRODUCER,
          "describe(nothing);", ""),
    *(
        plant(f"V of no keys released before it is handed on, {call}", call, LOST, PREFILL,
              "ptx::wait(ring_.full_values(turn_), Parts::phase(turn_));", "{}")
        for call in ("codes", *(f"nothing before {what}" for what in
                                ("codes of values", "value_mod", "rope and value_mod")))
    ),
    plant("changers hand on no record", "codes", LOST, CHANGER,
          "ring_.write_record(turn_, record);", "{}"),
    plant("each changer hands on a record", "codes", RACE, CHANGER, "Side::kKeys && first_ == 0",
          "Side::kKeys"),
    plant("numbers of the tile after", "codes of keys", VALUES, CHANGER, "put<First>(held);",
          "if constexpr (!kBoth) { look_ahead(); } put<First>(held);"),
    plant("numbers of other rows", "codes", VALUES, CHANGER,
          "record.tile.begin + first_ + lane : 0", "record.tile.begin + lane : 0"),
    plant("hooks see other positions", "rope", VALUES, CHANGER,
          "record.tile.begin + first_ + r);", "record.tile.begin + r);"),
    plant("codes beyond the end are widened", "codes of floats", NAN, CHANGER,
          "const int count = count_of(record);", "const int count = kRows;"),
    plant("values beyond the end are not cleared", "value_mod", NAN, CHANGER,
          "if (!Side::kKeys && count < kRows)", "if (false)"),
    plant("one value beyond the end is not cleared", "value_mod", NAN, CHANGER,
          "first_ + max(count, 0)", "first_ + max(count, 0) + 1"),
    plant("codes of one page over each other", "codes in pages", (*RACE, *VALUES, *NAN), PRODUCER,
          "kRowBytes = Side::kCoded ? Side::kPitch", "kRowBytes = Side::kCoded ? 0"),
    plant("maps of codes have a swizzle", "codes", ("tensor map", *VALUES), MAPS, "kCoded ? 0 : 3",
          "kCoded ? 3 : 3", host=True),
    plant("maps of codes have strides of halves", "codes", (*VALUES, *NAN, *BOUNDS), MAPS,
          "(kCoded ? 1 : 2) * stride", "2 * stride", host=True),
    # Turns of the two groups
    plant("no first turn", "turns", STUCK, PREFILL, "if (kTakesTurns && group() == 1)",
          "if (false)"),
    plant("a turn is passed to the own group", "turns", (*STUCK, "barrier"), PREFILL,
          "turn_of(group() ^ 1)", "turn_of(group())"),
    plant("a turn is for one group", "turns", (*STUCK, "barrier"), PREFILL,
          "kTurnThreads = 2 * ptx::kGroupThreads", "kTurnThreads = ptx::kGroupThreads"),
    # Records
    plant("a record read before it is there", "causal", RACE, PREFILL,
          f"{K_THERE}\n    {READS_RECORD}",
          f"const auto r = {READS_RECORD.removeprefix('return ')} {K_THERE} return r;"),
    plant("a record overwritten while lanes read it", "proven empty", RACE, RING,
          "__syncwarp();  // before one lane", "// before one lane"),
    plant("the record of another stage", "causal", RACE, PREFILL, "ring_.read_record(turn_)",
          "ring_.read_record(turn_ + 1)"),
    plant("the last tile of a run is the item's last", "causal", LOST, PRODUCER,
          "!more && last_run", "!more"),
    plant("no tile is the last", "causal", LOST, PRODUCER, "!more && last_run", "false"),
    plant("values of the tile after", "causal", VALUES, PRODUCER,
          "if (before.valid()) send_values(before,", "if (before.valid()) send_values(tile,"),
    # Runs that are found ahead
    plant("a run read before it is there", "many items", LOST, PRODUCER,
          "ptx::wait(ring_.full_run(num_runs_), Ring::run_phase(num_runs_));", ""),
    plant("a run overwritten before it is read", "many items", LOST, PRODUCER,
          "ptx::wait(ring_.empty_run(n), Parts::run_phase(n) ^ 1);", ""),
    plant("runs are not released", "many items", STUCK, PRODUCER,
          "if (ptx::lane_index() == 0) ptx::arrive(ring_.empty_run(num_runs_));", ""),
    plant("the parity of runs is not flipped", "many items", LOST, RING, "return n / kRuns & 1;",
          "return 0;"),
    plant("each run is the item's last", "many items", LOST, PRODUCER,
          "run.full}, last, !run.valid()", "run.full}, true, !run.valid()"),
    plant("an item without a run has one", "proven empty", LOST, PRODUCER,
          "last, !run.valid()}", "last, false}"),
    plant("rows of a box from the driver's map", "pages of 16", ("tensor map",), PRODUCER,
          "rows_(params.box_rows)", "rows_(params.maps.k.box[1])"),
    plant("the first tile has no mask", "sliding", VALUES, PREFILL, "hook_scores<true, Config",
          "hook_scores<false, Config"),
    plant("masked tiles are full", "causal", VALUES, RING, "const uint32_t flags = r.tile.full |",
          "const uint32_t flags = 1 |"),
    plant("full tiles end a loop of masked ones late", "causal", VALUES, PREFILL,
          "if (next.tile.full == kMasked) break;", ""),
    plant("nothing is something", "no keys", LOST, PRODUCER, "{{0, 0, false}, true, true}",
          "{{0, 0, false}, true, false}"),
    # Operands
    plant("stride and leading exchanged", "ragged 128", (*RACE, *VALUES), PRODUCTS,
          "uint32_t leading_bytes, uint32_t stride_bytes",
          "uint32_t stride_bytes, uint32_t leading_bytes"),
    plant("stride and leading of V exchanged", "ragged 128", VALUES, PRODUCTS,
          "operand(v, VLayout::kPanelBytes, kPatternBytes)",
          "operand(v, kPatternBytes, VLayout::kPanelBytes)"),
    plant("no step of 32 bytes", "ragged 128", VALUES, PRODUCTS, "step % 4 * 32", "0"),
    plant("no step of a panel", "ragged 128", (*VALUES, "descriptor"), PRODUCTS,
          "panel = step / 4,", "panel = 0,"),
    plant("no step of keys", "ragged 128", VALUES, PRODUCTS, "step * 2 * kPatternBytes", "0"),
    plant("V by steps of 8 keys", "ragged 128", VALUES, PRODUCTS, "step * 2 * kPatternBytes",
          "step * kPatternBytes"),
    plant("another swizzle of operands", "ragged 128", (*VALUES, "descriptor"), PRODUCTS,
          "uint64_t{1} << 62", "uint64_t{2} << 62"),
    plant("another swizzle of rows of Q", "ragged 128", VALUES, LAYOUT,
          "% 8 ^ (row & 7)", "% 8 ^ (row & 3)"),
    plant("another swizzle of maps", "ragged 128", ("tensor map", *VALUES), MAPS, "kCoded ? 0 : 3",
          "kCoded ? 0 : 2", host=True),
    plant("tiles aligned to 512 bytes", "ragged 128", ("descriptor",), SOURCE,
          "fajit::Kernel::run(params, panels)", "fajit::Kernel::run(params, panels + 512)",
          more_shared=1024),
    plant("Q of the first group for both", "ragged 128", RACE, PREFILL,
          "group() * ptx::kGroupRows * kPanelRowBytes", "0"),
    plant("scores are added to those before", "causal", VALUES, PRODUCTS, "step != 0", "1"),
    # Places
    plant("head and row exchanged", "ragged 128", (*VALUES, *NAN), PRODUCER,
          "static_cast<int32_t>(at), head, outer", "head, static_cast<int32_t>(at), outer"),
    plant("head and page exchanged", "pages 128", (*VALUES, *NAN), PRODUCER,
          "static_cast<int32_t>(at), head, outer", "static_cast<int32_t>(at), outer, head"),
    plant("strides of rows and heads exchanged", "ragged 128", (*VALUES, *NAN, *BOUNDS), MAPS,
          "stride[2 - i]", "stride[i == 0 ? 1 : i == 1 ? 2 : 0]", host=True),
    plant("all panels are the first", "ragged 128", VALUES, PRODUCER, "panel * kPanelColumns,",
          "0,"),
    plant("heads of V as K has them", "broadcast V", VALUES, PRODUCER,
          "a_.v_stride[1] == 0 ? 0 : head", "head"),
    plant("rows from the first request on", "ragged 128", (*VALUES, *NAN), PRODUCER,
          "a_.kv_row0[item.request]", "0"),
    plant("boxes of a whole tile for pages", "pages of 16", (*VALUES, *NAN), MAPS,
          "Config::kPaged ? greatest_divisor", "false ? greatest_divisor", host=True),
    plant("boxes of a tile over each other", "pages of 16", RACE, PRODUCER,
          "panel * Layout::kPanelBytes + first * kRowBytes", "panel * Layout::kPanelBytes"),
    plant("boxes behind the last page", "pages of 16", (*BOUNDS, *VALUES, *NAN), PRODUCER,
          "at = at < place_.last_box ? at : place_.last_box;", ""),
    plant("the next request's rows are not cleared", "ragged", NAN, PRODUCER,
          "place_.first_row + tile.end < a_.kv_rows", "false"),
    plant("unwritten slots are not cleared", "pages of 16", NAN, PRODUCER,
          "Config::kPaged || place_", "place_"),
    plant("one row is not cleared", "ragged", NAN, CHANGES, "int i = first * kChunks",
          "int i = (first + 1) * kChunks"),
    plant("rows of one panel are cleared", "ragged 128", NAN, CHANGES,
          "kChunks = Layout::kPanels * 8", "kChunks = 8"),
    # The end
    plant("the block ends before a copy", "causal", EXIT, PRODUCER, SENT, SENT + COPY_TO_NOBODY),
    plant("more registers than there are", "causal", STUCK, SOURCE, "kConsumerRegisters = 224",
          "kConsumerRegisters = 232"),
    plant("registers given by three warps of four", "causal", ("warpgroup", *STUCK), PREFILL,
          "if constexpr (Config::kProducerRegisters > 0)",
          "if (warp != Parts::kConsumerWarps) if constexpr (Config::kProducerRegisters > 0)"),
    plant("rows past the end are written", "causal", VALUES, PREFILL,
          "count, own);", "kWarpRows, own);"),
    plant("the output is not rescaled", "steep", VALUES, PREFILL,
          "if (moved) Softmax::multiply(o, factor);", ""),
    plant("rows staged while they are written", "output_mod", RACE, PREFILL,
          f"{LANES}\n      }}\n    }}", "}\n    }"),
    plant("rows written while they are staged", "output_mod", RACE, PREFILL,
          f"{LANES}\n        for (int r = first;", "for (int r = first;"),
    plant("packed rows read while they are written", "causal", RACE, PREFILL,
          f"if (packs) {{\n        {LANES}", "if (packs) {"),
    plant("Q released while lanes read packed rows", "many items", RACE, PREFILL,
          f"{LANES}\n  }}\n\n  const Context c_;", "}\n\n  const Context c_;"),
)  # fmt: skip


def plant_in_artifacts(include: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Artifacts are compiled from the mutant's headers."""
    library()  # of the emulator, which the other cache does not have
    monkeypatch.setattr(env, "include_dir", lambda: include)
    monkeypatch.setattr(entry, "sources_digest", functools.cache(entry.sources_digest.__wrapped__))
    for loaded in ("_modules", "_taken", "_asked"):
        monkeypatch.setattr(module.default, loaded, {})
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(cache))


def outcome(mode: str, call: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a call in some order gives: the kind of its fault, "NaN", "wrong", or "" if it is
    right."""
    monkeypatch.setenv(COPIES, mode)
    made = CALLS[call]()
    try:
        results = made.run()
    except EmulatorFault as fault:
        return fault.kind
    if results[0].isnan().any():
        return "NaN"
    try:
        made.check(results)
    except AssertionError:
        return "wrong"
    return ""


def outcomes(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """(mode, outcome) of the mutant's call in all modes."""
    if mutant.host:
        plant_in_artifacts(mutated_headers(mutant, tmp_path), monkeypatch, tmp_path / "cache")
    else:
        run_mutated(mutant, tmp_path, monkeypatch)
    for mode in MODES:
        yield mode, outcome(mode, mutant.call, monkeypatch)


def test_the_headers_have_the_texts() -> None:
    check_texts(MUTANTS)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mutant", rotation.chosen(MUTANTS, 7), ids=lambda m: m.name)
def test_the_mutant_is_found(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = next((o for _, o in outcomes(mutant, tmp_path, monkeypatch) if o), "nothing")
    assert found in mutant.found


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("call", rotation.chosen(list(CALLS), 16))
def test_bits_depend_on_no_order(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = kinds_that_run(monkeypatch)
    monkeypatch.setenv(COPIES, "late")
    made = CALLS[call]()
    first = made.run()
    made.check(first)
    assert "prefill_wgmma" in kinds
    for mode in ("early", *(f"random:{seed}" for seed in SEEDS)):
        monkeypatch.setenv(COPIES, mode)
        for got, expected in zip(made.run(), first, strict=True):
            assert torch.equal(got, expected), mode
