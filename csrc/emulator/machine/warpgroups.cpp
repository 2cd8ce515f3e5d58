#include "machine/warpgroups.h"

#include <algorithm>

#include "machine/machine.h"

namespace fajit::emulator {
namespace {

// Registers of a wgmma: accumulators, and those of A, if it is in registers.
uint32_t num_held(const Insn& insn) { return insn.count * 4u + (insn.slots[1] == kNoSlot ? 4 : 0); }

const Product& in_flight(const Warp& warp, uint32_t serial) {
  return warp.products.in_flight[serial - warp.products.in_flight.front().serial];
}

}  // namespace

void Block::reset_warpgroups() {
  warpgroups_.assign((warps_.size() + kGroupWarps - 1) / kGroupWarps, Warpgroup{});
  free_registers_ = 0;
  for (Warp& warp : warps_) {
    warp.products = WarpProducts{};
    warp.products.held.resize(kernel().held.size());
    warp.register_count = std::min(65536 / (num_threads_ * kernel().min_blocks) / 8 * 8, 256u);
  }
}

void Block::execute_together(Warp& warp, const GroupEvent& event) {
  const uint32_t first = warp.index / kGroupWarps * kGroupWarps;
  if (first + kGroupWarps > warps_.size() || warps_[first + kGroupWarps - 1].existing != kAllLanes)
    fault(
        warp, 0, "warpgroup",
        "the warpgroup is incomplete: the block has " + std::to_string(num_threads_) + " threads");
  Warpgroup& group = warpgroups_[warp.index / kGroupWarps];
  uint32_t& executed = group.executed[warp.index % kGroupWarps];
  if (executed == group.events.size()) {
    group.events.push_back(event);
  } else if (const GroupEvent& other = group.events[executed]; other != event) {
    const uint32_t pc = std::get<0>(other);
    fault(warp, 0, "warpgroup",
          "another warp of the warpgroup executed " +
              (pc == warp.current
                   ? "it with another descriptor or scale-d"
                   : "the " + kernel().mnemonics[pc] + " at " + source_of(pc) + " instead"));
  }
  ++executed;
  const uint32_t* counts = group.executed;
  if (std::all_of(counts, counts + kGroupWarps, [&](uint32_t n) { return n == counts[0]; })) {
    std::fill_n(group.executed, kGroupWarps, 0u);
    group.events.clear();
  }
}

void Block::check_warpgroups_at_end() {
  for (uint32_t i = 0; i < warps_.size(); ++i) {
    const Warpgroup& group = warpgroups_[i / kGroupWarps];
    const uint32_t executed = group.executed[i % kGroupWarps];
    if (executed == group.events.size()) continue;
    warps_[i].current = std::get<0>(group.events[executed]);
    fault(warps_[i], 0, "warpgroup",
          "warp " + std::to_string(i) +
              " ended without executing it, which another warp of the warpgroup did");
  }
}

// Products

void Block::fault_held(const Warp& warp, uint32_t serial, const std::string& access) const {
  fault(warp, 0, "in flight",
        access + " of the wgmma at " + source_of(in_flight(warp, serial).pc) +
            ", which may still be running: a wait is missing");
}

void Block::check_registers(Warp& warp) {
  WarpProducts& products = warp.products;
  const std::vector<uint32_t>& ends = kernel().uses_end;
  for (uint32_t i = warp.current == 0 ? 0 : ends[warp.current - 1]; i < ends[warp.current]; ++i) {
    const bool writes = (kernel().uses[i] & kWriteUse) != 0;
    const uint32_t index = kernel().uses[i] / kLanes;
    if (!kernel().held[index]) continue;
    HeldRegister& held = products.held[index];
    if (held.accumulating != 0)
      fault_held(warp, held.accumulating,
                 writes ? "a write of an accumulator" : "a read of an accumulator");
    if (writes && held.reading != 0) fault_held(warp, held.reading, "a write of an A register");
    held.accessed = products.fences;
    held.pc = warp.current;
  }
}

void Block::hold_registers(Warp& warp, const Insn& insn, uint32_t serial) {
  WarpProducts& products = warp.products;
  const uint32_t* slots = kernel().lists.data() + insn.list;
  const uint32_t accumulators = insn.count * 4u;
  if (products.fences == 0)
    fault(warp, 0, "fence", "no wgmma.fence before the first wgmma of the warp");
  // Products with the same accumulators are performed in order; others may not share registers.
  const uint32_t before = products.held[slots[0] / kLanes].accumulating;
  bool chained = false;
  if (before != 0) {
    const Insn& other = kernel().code[in_flight(warp, before).pc];
    chained = other.count == insn.count &&
              std::equal(slots, slots + accumulators, kernel().lists.data() + other.list);
  }
  for (uint32_t i = 0; i < num_held(insn); ++i) {
    HeldRegister& held = products.held[slots[i] / kLanes];
    const bool accumulates = i < accumulators;
    if (held.accumulating != 0 && !(accumulates && chained))
      fault_held(warp, held.accumulating, "a use by another wgmma of an accumulator");
    if (accumulates && held.reading != 0)
      fault_held(warp, held.reading, "a write by another wgmma of an A register");
    if (held.accessed == products.fences)
      fault(warp, 0, "fence",
            std::string(accumulates ? "an accumulator" : "an A register") + " was accessed at " +
                source_of(held.pc) + ", and no wgmma.fence has been executed since");
    (accumulates ? held.accumulating : held.reading) = serial;
  }
}

void Block::issue_product(Warp& warp, const Insn& insn, Product product) {
  WarpProducts& products = warp.products;
  product.pc = warp.current;
  product.serial = ++products.issued;
  product.group = products.committed;
  hold_registers(warp, insn, product.serial);
  for (const uint32_t chunk : product.chunks) {
    shared_inside(warp, 0, chunk, kOperandChunk, "a read by wgmma");
    if (track_)
      report(warp, 0, history_.begin_async_read(warp.index, warp.current, chunk, kOperandChunk),
             "a read by wgmma");
  }
  // A delay of up to 1,023 instructions, with short and long ones equally likely.
  const Completion completion = launch_.options.completion;
  if (completion == Completion::random) product.due = products.steps + (1u << draw(11)) - 1;
  products.in_flight.push_back(std::move(product));
  products.drawing = completion == Completion::random;
  if (completion == Completion::early) perform_products(warp, products.in_flight.size());
}

// Performs those that have not been, up to the first `count` of those in flight.
void Block::perform_products(Warp& warp, size_t count) {
  WarpProducts& products = warp.products;
  for (; products.performed < count; ++products.performed) {
    const Product& product = products.in_flight[products.performed];
    product.perform(warp, kernel().code[product.pc], product);
  }
  products.drawing = products.drawing && products.performed < products.in_flight.size();
}

void Block::step_products(Warp& warp) {
  WarpProducts& products = warp.products;
  ++products.steps;
  while (products.drawing && products.in_flight[products.performed].due < products.steps)
    perform_products(warp, products.performed + 1);
}

void Block::wait_products(Warp& warp, uint64_t pending) {
  WarpProducts& products = warp.products;
  auto& issued = products.in_flight;
  const auto covered = std::find_if(issued.begin(), issued.end(), [&](const Product& product) {
    return product.group + pending >= products.committed;
  });
  const size_t count = static_cast<size_t>(covered - issued.begin());
  perform_products(warp, count);
  for (auto product = issued.begin(); product != covered; ++product) {
    for (const uint32_t chunk : product->chunks)
      if (track_) history_.end_async_read(warp.index, product->pc, chunk, kOperandChunk);
    const Insn& insn = kernel().code[product->pc];
    const uint32_t* slots = kernel().lists.data() + insn.list;
    for (uint32_t i = 0; i < num_held(insn); ++i) {
      HeldRegister& held = products.held[slots[i] / kLanes];
      if (held.accumulating == product->serial) held.accumulating = 0;
      if (held.reading == product->serial) held.reading = 0;
    }
  }
  issued.erase(issued.begin(), covered);
  products.performed -= count;
}

// Register counts

bool Block::set_register_count(Warp& warp, const Insn& insn) {
  const int64_t change = insn.immediate - int64_t{warp.register_count};
  if (insn.mode != 0 ? change < 0 : change > 0)
    fault(warp, 0, "registers",
          "to " + std::to_string(insn.immediate) + " registers a thread, which has " +
              std::to_string(warp.register_count));
  if (change * kLanes > free_registers_) return false;
  execute_together(warp, {warp.current, false, 0, 0});
  free_registers_ -= change * kLanes;
  warp.register_count = static_cast<uint32_t>(insn.immediate);
  for (Warp& other : warps_) wake(other, Wait::registers);  // they try again
  return true;
}

}  // namespace fajit::emulator
