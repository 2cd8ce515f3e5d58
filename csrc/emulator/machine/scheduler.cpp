// Scheduling of threads. Each thread has its own program counter. In a warp, the threads with the
// lowest one run together until they reach the next other thread, so divergent threads reconverge
// where the control flow does. Warps run in turn, each until it waits or its time slice ends; where
// asynchronous operations complete at random moments, in a drawn order and for drawn times.
#include <algorithm>
#include <string>

#include "machine/machine.h"

namespace fajit::emulator {
namespace {

constexpr uint32_t kTurnBits = 14;  // of the instructions of a warp before the next warp runs

void set_lane(uint32_t& predicate, int lane, bool value) {
  predicate = (predicate & ~(1u << lane)) | static_cast<uint32_t>(value) << lane;
}

// Whether the member masks of a rendezvous include all lanes.
bool is_for_all(const Warp& warp, const Insn& insn) {
  if (insn.slots[0] == kNoSlot) return true;
  uint32_t common = kAllLanes;
  for (int lane = 0; lane < kLanes; ++lane) common &= warp.words(insn.slots[0])[lane];
  return common == kAllLanes;
}

}  // namespace

void Block::run(uint32_t x, uint32_t y, uint32_t z) {
  reset(x, y, z);
  const uint32_t num_warps = static_cast<uint32_t>(warps_.size());
  for (;;) {
    bool alive = false, moved = false;
    for (uint32_t i = num_warps - 1; random() && i > 0; --i)
      std::swap(turns_[i], turns_[draw(i + 1)]);
    for (const uint32_t index : turns_) {
      Warp& warp = warps_[index];
      if (warp.alive == 0) continue;
      moved = run_warp(warp) || moved;
      alive = alive || warp.alive != 0;
      if (random() && draw(2) != 0) moved = complete_one() || moved;
    }
    if (!alive) break;
    // Operations that complete late do so when nobody can go on without them.
    const bool stuck = !moved || polls_ != 0;
    polls_ = 0;
    if (stuck && !complete_one() && !moved) report_deadlock();
  }
  check_copies_at_end();
  check_warpgroups_at_end();
}

bool Block::complete_one() {
  const size_t count = loads_.size() + copy_arrivals_.size();
  if (count == 0) return false;
  const size_t index = random() ? draw(static_cast<uint32_t>(count)) : 0;
  if (index < loads_.size()) finish_load(index);
  else finish_copy_arrival(index - loads_.size());
  return true;
}

uint32_t Block::draw(uint32_t n) {  // splitmix64
  uint64_t bits = generator_ += 0x9e3779b97f4a7c15ull;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(((bits ^ bits >> 31) >> 32) * n >> 32);
}

bool Block::completes_at_issue() {
  return random() ? draw(2) != 0 : launch_.options.completion == Completion::early;
}

bool Block::run_warp(Warp& warp) {
  const Insn* code = kernel().code.data();
  const uint32_t turn = random() ? 1 + draw(2u << draw(kTurnBits)) : 1u << kTurnBits;
  uint32_t left = turn;
  while (left > 0) {
    // Find the lowest program counter, its lanes, and the next lowest.
    const uint32_t runnable = warp.alive & ~warp.blocked;
    if (runnable == 0) return left < turn;
    uint32_t pc = ~0u, other = ~0u, mask = 0;
    for (uint32_t rest = runnable; rest != 0; rest &= rest - 1)
      pc = std::min(pc, warp.pc[__builtin_ctz(rest)]);
    for (uint32_t rest = runnable; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (warp.pc[lane] == pc) mask |= 1u << lane;
      else other = std::min(other, warp.pc[lane]);
    }
    auto settle = [&](uint32_t lanes, uint32_t at) {
      for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) warp.pc[__builtin_ctz(rest)] = at;
    };
    // Run them together until they diverge, wait, or reach other lanes.
    for (bool together = true; together; --left) {
      const Insn& insn = code[pc];
      warp.current = pc;
      uint32_t active = mask;
      if (insn.guard != kNoSlot) {
        const uint32_t guard = warp.predicate(insn.guard);
        active &= insn.guard_negated ? ~guard : guard;
      }
      if ((insn.flags & kSharesHeld) != 0 && active != 0) check_registers(warp);
      if (warp.products.drawing) step_products(warp);
      if (active == 0) {
        ++pc;
      } else if (insn.flow == Flow::straight ||
                 (insn.flow == Flow::rendezvous && active == kAllLanes && is_for_all(warp, insn))) {
        insn.exec(warp, insn, active);
        ++pc;
      } else if (insn.flow == Flow::branch && active == mask) {
        pc = insn.target;
      } else {
        settle(mask & ~active, pc + 1);
        settle(active, insn.flow == Flow::branch ? insn.target : pc);
        together = false;
        switch (insn.flow) {
          case Flow::table: insn.exec(warp, insn, active); break;  // sets warp.pc
          case Flow::exit: leave(warp, active); break;
          case Flow::rendezvous:
          case Flow::registers: rendezvous(warp, insn, active); break;
          case Flow::barrier: arrive(warp, insn, active); break;
          case Flow::wait: insn.exec(warp, insn, active); break;  // sets warp.pc, or suspends
          default: break;
        }
      }
      if (together && (pc >= other || left == 1)) {
        settle(mask, pc);
        together = false;
      }
    }
  }
  steps_ += turn;
  if (steps_ > launch_.options.step_limit)
    fault(warp, 0, "no progress",
          "the block ran for " + std::to_string(steps_) + " instructions; is it waiting for " +
              "memory that no other thread of it writes?");
  return true;
}

void Block::leave(Warp& warp, uint32_t mask) {
  if (const uint32_t early = warp.early & mask; early != 0)
    fault(warp, __builtin_ctz(early), "dependency",
          "the thread ends without waiting for the kernel before, so the kernel after this one may "
          "start while that one runs");
  if (!warp.products.in_flight.empty())
    fault(warp, __builtin_ctz(mask), "in flight",
          "the thread ends while the wgmma at " + source_of(warp.products.in_flight[0].pc) +
              " may still be running: a wait is missing");
  check_copies_at_exit(warp, mask);
  warp.alive &= ~mask;
  // Lanes that wait in a rendezvous check again which lanes have not exited.
  wake(warp, Wait::rendezvous);
}

void Block::wake(Warp& warp, Wait waits, uint32_t mbarrier) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.wait[lane] != waits) continue;
    if (waits == Wait::mbarrier && warp.barrier[lane] != mbarrier) continue;
    warp.wait[lane] = Wait::none;
    warp.blocked &= ~(1u << lane);
  }
}

// slots[0] is the member mask (absent: all lanes). Lanes whose members have all arrived continue.
void Block::rendezvous(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t pc = warp.current;
  const uint32_t* masks = insn.slots[0] == kNoSlot ? nullptr : warp.words(insn.slots[0]);
  uint32_t here = mask;
  for (int lane = 0; lane < kLanes; ++lane)
    if (warp.wait[lane] == Wait::rendezvous && warp.pc[lane] == pc) here |= 1u << lane;
  for (uint32_t rest = here; rest != 0;) {
    const int lane = __builtin_ctz(rest);
    const uint32_t members = masks == nullptr ? kAllLanes : masks[lane];
    if ((members >> lane & 1) == 0)
      fault(warp, lane, "member mask", "the thread is not in its own member mask");
    if ((insn.flags & kCollective) != 0 && warp.alive != kAllLanes)
      fault(warp, lane, "member mask", "all 32 lanes must take part, and some have exited");
    const uint32_t needed = members & warp.alive;
    if ((needed & ~here) != 0) {
      warp.wait[lane] = Wait::rendezvous;
      warp.blocked |= 1u << lane;
      rest &= ~(1u << lane);
      continue;
    }
    for (uint32_t others = needed; masks != nullptr && others != 0; others &= others - 1)
      if (masks[__builtin_ctz(others)] != members)
        fault(warp, lane, "member mask", "lanes meet here with different member masks");
    if (insn.flow == Flow::registers && !set_register_count(warp, insn)) {
      std::fill_n(warp.wait, kLanes, Wait::registers);
      warp.blocked = kAllLanes;
      return;
    }
    if (insn.exec != nullptr) insn.exec(warp, insn, needed);
    for (uint32_t others = needed; others != 0; others &= others - 1) {
      warp.wait[__builtin_ctz(others)] = Wait::none;
      warp.pc[__builtin_ctz(others)] = pc + 1;
    }
    warp.blocked &= ~needed;
    rest &= ~needed;
    here &= ~needed;
  }
}

// slots[0]: barrier, slots[1]: number of threads or absent, slots[2]: predicate of bar.red,
// slots[3]: its result. mode: 0 sync, 1 arrive, else a reduction. count 1: .aligned.
void Block::arrive(Warp& warp, const Insn& insn, uint32_t mask) {
  const int first = __builtin_ctz(mask);
  const uint32_t id = warp.words(insn.slots[0])[first];
  const uint32_t whole = static_cast<uint32_t>(warps_.size()) * kLanes;
  const uint32_t expected = insn.slots[1] == kNoSlot ? whole : warp.words(insn.slots[1])[first];
  if (id >= kBarriers) fault(warp, first, "barrier", "there is no barrier " + std::to_string(id));
  if (expected == 0 || expected % kLanes != 0 || expected > whole)
    fault(warp, first, "barrier",
          "a count of " + std::to_string(expected) + " threads, in a block of " +
              std::to_string(num_threads_));
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
    if (warp.words(insn.slots[0])[__builtin_ctz(rest)] != id)
      fault(warp, first, "barrier", "threads of a warp name different barriers");
  Barrier& barrier = barriers_[id];
  if (barrier.expected == 0) {
    barrier.expected = expected;
    barrier.pc = warp.current;
  } else if (barrier.expected != expected) {
    fault(warp, first, "barrier",
          "barrier " + std::to_string(id) + " for " + std::to_string(expected) + " threads; at " +
              source_of(barrier.pc) + " it was for " + std::to_string(barrier.expected));
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (insn.count == 1 && warp.wait[lane] == Wait::barrier && warp.barrier[lane] == id &&
        warp.pc[lane] != warp.current)
      fault(warp, first, "divergent barrier",
            "threads of one warp wait for barrier " + std::to_string(id) + " at " +
                source_of(warp.pc[lane]) + " too");
  barrier.threads += static_cast<uint32_t>(__builtin_popcount(mask));
  barrier.arrived += static_cast<uint32_t>(__builtin_popcount(mask));
  history_.arrive(warp.index, kEveryLane, barrier.order);
  if (insn.slots[2] != kNoSlot)
    barrier.votes += static_cast<uint32_t>(__builtin_popcount(
        (warp.predicate(insn.slots[2]) ^ (insn.immediate != 0 ? ~0u : 0u)) & mask));
  // The missing lanes of the last warp arrive with its existing ones.
  if (warp.existing != kAllLanes && (mask >> __builtin_ctz(warp.existing) & 1) != 0)
    barrier.arrived += static_cast<uint32_t>(kLanes - __builtin_popcount(warp.existing));
  const bool waits = insn.mode != 1;  // bar.arrive does not
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (waits) warp.wait[lane] = Wait::barrier;
    else ++warp.pc[lane];
    warp.barrier[lane] = id;
  }
  if (waits) warp.blocked |= mask;
  if (barrier.arrived > barrier.expected)
    fault(warp, first, "barrier",
          "more threads come to barrier " + std::to_string(id) + " than it is for");
  if (barrier.arrived == barrier.expected) release(id);
}

void Block::release(uint32_t id) {
  const uint32_t votes = barriers_[id].votes;
  for (Warp& warp : warps_) {
    bool waited = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (warp.wait[lane] != Wait::barrier || warp.barrier[lane] != id) continue;
      waited = true;
      const Insn& insn = kernel().code[warp.pc[lane]];
      const bool holds = insn.mode == 3 ? votes == barriers_[id].threads : votes != 0;
      if (insn.slots[3] != kNoSlot && insn.mode == 2) warp.words(insn.slots[3])[lane] = votes;
      else if (insn.slots[3] != kNoSlot) set_lane(warp.predicate(insn.slots[3]), lane, holds);
      warp.wait[lane] = Wait::none;
      warp.blocked &= ~(1u << lane);
      ++warp.pc[lane];
    }
    if (waited) history_.leave(warp.index, barriers_[id].order);
  }
  barriers_[id] = Barrier{};
}

void Block::report_deadlock() {
  auto lanes = [](uint32_t mask) {
    char text[32];
    std::snprintf(text, sizeof text, " lanes 0x%08x", mask);
    return std::string(text);
  };
  std::string text = "every thread that has not exited waits";
  const Warp* first = nullptr;
  for (Warp& warp : warps_) {
    const std::string name = "\n    warp " + std::to_string(warp.index);
    for (uint32_t rest = warp.alive; rest != 0;) {
      const int lane = __builtin_ctz(rest);
      const uint32_t pc = warp.pc[lane];
      uint32_t same = 0;
      for (int other = lane; other < kLanes; ++other)
        if ((rest >> other & 1) != 0 && warp.pc[other] == pc) same |= 1u << other;
      rest &= ~same;
      if (first == nullptr) first = &warp, warp.current = pc;
      text += name + lanes(same) + " at " + source_of(pc) + ": " + kernel().mnemonics[pc];
      if (warp.wait[lane] == Wait::registers)
        text += ", " + std::to_string(kernel().code[pc].immediate) +
                " registers for each of 32 threads, which have " +
                std::to_string(warp.register_count) + "; the block has " +
                std::to_string(free_registers_) + " free";
      if (warp.wait[lane] == Wait::mbarrier)
        text += ", " + describe(mbarriers_[warp.barrier[lane]]);
      if (warp.wait[lane] != Wait::barrier) continue;
      const Barrier& barrier = barriers_[warp.barrier[lane]];
      text += ", barrier " + std::to_string(warp.barrier[lane]) + ", " +
              std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) +
              " threads";
    }
    if (warp.alive != warp.existing)
      text += name + lanes(warp.existing & ~warp.alive) + " have exited";
  }
  fault(*first, __builtin_ctz(first->alive), "deadlock", text);
}

}  // namespace fajit::emulator
