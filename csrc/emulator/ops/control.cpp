// Branches, exits, and barriers: decoding. The scheduler executes them.
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

// slots[0]: index; list: targets; target: their number (`count` is too narrow for long tables).
void branch_by_index(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t* targets = warp.block->kernel().lists.data() + insn.list;
  const uint32_t* index = warp.words(insn.slots[0]);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (index[lane] >= insn.target)
      warp.block->fault(warp, lane, "branch",
                        "index " + std::to_string(index[lane]) + " of a table with " +
                            std::to_string(insn.target) + " targets");
    warp.pc[lane] = targets[index[lane]];
  }
}

void trap(Warp& warp, const Insn&, uint32_t mask) {
  warp.block->fault(warp, __builtin_ctz(mask), "trap", "the kernel ended itself");
}

void meet(Warp& warp, const Insn&, uint32_t mask) { warp.block->sync_warp(warp, mask); }

void wait_for_grid(Warp& warp, const Insn&, uint32_t mask) { warp.early &= ~mask; }
void launch_dependents(Warp&, const Insn&, uint32_t) {}

}  // namespace

void decode_bra(Decoder& d) {
  d.accept("uni");
  d.expect_operands(1);
  d.insn.flow = Flow::branch;
  d.insn.target = d.label(d.operand(0));
}

void decode_brx(Decoder& d) {
  if (!d.accept("idx")) d.fail("expected .idx");
  d.accept("uni");
  d.expect_operands(2);
  const std::vector<std::string>* table = d.branch_table(d.operand(1).name);
  if (table == nullptr) d.fail("unknown table of branch targets");
  std::vector<uint32_t> targets;
  for (const std::string& name : *table) targets.push_back(d.label_of(name));
  d.insn.flow = Flow::table;
  d.insn.slots[0] = d.source(0, Type::u32);
  d.insn.list = d.add_list(targets);
  d.insn.target = static_cast<uint32_t>(targets.size());
  d.insn.exec = branch_by_index;
}

void decode_exit(Decoder& d) {
  d.accept("uni");
  d.expect_operands(0);
  d.insn.flow = Flow::exit;
}

void decode_trap(Decoder& d) { d.insn.exec = trap; }

// A kernel that was launched to overlap the one before it is run after it, so what the threads do
// before .wait is checked instead: see Block::global_at and Block::leave.
void decode_griddepcontrol(Decoder& d) {
  d.require_target(78, 90);
  d.expect_operands(0);
  d.insn.exec =
      d.expect_one({"wait", "launch_dependents"}) == 0 ? wait_for_grid : launch_dependents;
}

// bar and barrier: .sync, .arrive, .red.{popc,and,or}, and bar.warp.sync.
void decode_bar(Decoder& d) {
  if (d.accept("warp")) {
    if (!d.accept("sync")) d.fail("expected .sync");
    d.expect_operands(1);
    d.insn.flow = Flow::rendezvous;
    d.insn.slots[0] = d.source(0, Type::u32);
    d.insn.exec = meet;
    return;
  }
  d.accept("cta");
  const bool aligned = d.accept("aligned") || d.opcode() == "bar";
  const int form = d.expect_one({"sync", "arrive", "red"});
  d.insn.flow = Flow::barrier;
  d.insn.count = aligned;
  if (form != 2) {
    d.insn.mode = static_cast<uint8_t>(form);
    d.expect_operands(form == 1 ? 2 : 1, 2);
    d.insn.slots[0] = d.source(0, Type::u32);
    if (d.num_operands() == 2) d.insn.slots[1] = d.source(1, Type::u32);
    return;
  }
  d.insn.mode = static_cast<uint8_t>(2 + d.expect_one({"popc", "and", "or"}));
  const Type type = d.type();
  d.expect_operands(3, 4);
  d.insn.slots[3] = d.destination(0, type);
  d.insn.slots[0] = d.source(1, Type::u32);
  const size_t last = d.num_operands() - 1;
  if (last == 3) d.insn.slots[1] = d.source(2, Type::u32);
  d.insn.slots[2] = d.source(last, Type::pred);
  d.insn.immediate = d.operand(last).negated;
}

}  // namespace fajit::emulator
