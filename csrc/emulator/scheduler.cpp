// Which threads run next. Each thread has its own program counter. Of a warp, the threads at the
// lowest one run, as long as none of the others is behind them: so threads that parted meet again
// where control flow does. Warps run in turn, each until it waits or its turn is over.
#include <algorithm>
#include <string>

#include "machine.h"

namespace fajit::emulator {
namespace {

constexpr uint32_t kTurn = 1u << 14;  // instructions of a warp before the next one runs

}  // namespace

void Block::run(uint32_t x, uint32_t y, uint32_t z) {
  reset(x, y, z);
  for (;;) {
    bool alive = false, moved = false;
    for (Warp& warp : warps_) {
      if (warp.alive == 0) continue;
      moved = run_warp(warp) || moved;
      alive = alive || warp.alive != 0;
    }
    if (!alive) return;
    if (!moved) report_deadlock();
  }
}

bool Block::run_warp(Warp& warp) {
  const Insn* code = kernel().code.data();
  uint32_t left = kTurn;
  bool moved = false;
  while (left > 0) {
    // The lowest program counter, the lanes there, and the next lowest.
    const uint32_t runnable = warp.alive & ~warp.blocked;
    if (runnable == 0) return moved;
    uint32_t pc = ~0u, mask = 0, other = ~0u;
    for (uint32_t rest = runnable; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const uint32_t at = warp.pc[lane];
      if (at < pc) {
        other = pc;
        pc = at;
        mask = 1u << lane;
      } else if (at == pc) {
        mask |= 1u << lane;
      } else if (at < other) {
        other = at;
      }
    }
    auto settle = [&](uint32_t lanes, uint32_t at) {
      for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) warp.pc[__builtin_ctz(rest)] = at;
    };
    for (bool together = true; together;) {
      const Insn& insn = code[pc];
      warp.current = pc;
      uint32_t active = mask;
      if (insn.guard != kNoSlot) {
        const uint32_t guard = warp.predicate(insn.guard);
        active &= insn.guard_negated ? ~guard : guard;
      }
      switch (insn.flow) {
        case Flow::straight:
          if (active != 0) insn.exec(warp, insn, active);
          ++pc;
          break;
        case Flow::branch:
          if (active == mask) {
            pc = insn.target;
          } else if (active == 0) {
            ++pc;
          } else {
            settle(active, insn.target);
            settle(mask & ~active, pc + 1);
            together = false;
          }
          break;
        case Flow::table:
          settle(mask, pc + 1);
          insn.exec(warp, insn, active);  // sets warp.pc
          together = false;
          break;
        case Flow::exit:
          warp.alive &= ~active;
          // Those that wait for non-exited lanes look again.
          for (int lane = 0; lane < kLanes; ++lane)
            if (warp.wait[lane] == Wait::rendezvous) {
              warp.wait[lane] = Wait::none;
              warp.blocked &= ~(1u << lane);
            }
          settle(mask & ~active, pc + 1);
          together = false;
          break;
        case Flow::rendezvous:
          settle(mask & ~active, pc + 1);
          settle(active, pc);
          if (active == kAllLanes && mask == kAllLanes && insn.slots[0] == kNoSlot) {
            insn.exec(warp, insn, active);
            ++pc;
            break;
          }
          if (active != 0) rendezvous(warp, insn, active);
          together = false;
          break;
        case Flow::barrier:
          settle(mask & ~active, pc + 1);
          settle(active, pc);
          if (active != 0) arrive(warp, insn, active);
          together = false;
          break;
      }
      moved = true;
      if (together && (pc >= other || --left == 0)) {
        settle(mask, pc);
        together = false;
        if (left == 0) left = 1;
      }
      if (!together) --left;
    }
  }
  steps_ += kTurn;
  if (steps_ > launch_.options.step_limit)
    fault(warp, __builtin_ctz(warp.alive), "no progress",
          "the block ran for " + std::to_string(steps_) +
              " instructions; is it waiting for memory "
              "that no other thread of it writes?");
  return moved;
}

// slots[0] is the member mask (absent: all lanes). Lanes whose members have all come go on.
bool Block::rendezvous(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t pc = warp.current;
  uint32_t here = mask;
  for (int lane = 0; lane < kLanes; ++lane)
    if (warp.wait[lane] == Wait::rendezvous && warp.pc[lane] == pc) here |= 1u << lane;
  bool any = false;
  for (uint32_t rest = here; rest != 0;) {
    const int lane = __builtin_ctz(rest);
    const uint32_t* masks = insn.slots[0] == kNoSlot ? nullptr : warp.words(insn.slots[0]);
    const uint32_t members = masks == nullptr ? kAllLanes : masks[lane];
    if ((members >> lane & 1) == 0)
      fault(warp, lane, "member mask", "the thread is not in its own member mask");
    if (((insn.flags & kCollective) != 0 && (warp.alive & members) != members) ||
        (members & ~warp.existing) != 0)
      if ((insn.flags & kCollective) != 0)
        fault(warp, lane, "member mask", "all 32 lanes must take part, and some have exited");
    const uint32_t needed = members & warp.alive;
    rest &= ~(1u << lane);
    if ((needed & ~here) != 0) {
      warp.wait[lane] = Wait::rendezvous;
      warp.blocked |= 1u << lane;
      continue;
    }
    if (masks != nullptr)
      for (uint32_t others = needed; others != 0; others &= others - 1)
        if (masks[__builtin_ctz(others)] != members)
          fault(warp, lane, "member mask", "lanes meet here with different member masks");
    insn.exec(warp, insn, needed);
    for (uint32_t others = needed; others != 0; others &= others - 1) {
      const int member = __builtin_ctz(others);
      warp.wait[member] = Wait::none;
      warp.pc[member] = pc + 1;
    }
    warp.blocked &= ~needed;
    rest &= ~needed;
    here &= ~needed;
    any = true;
  }
  return any;
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
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (warp.words(insn.slots[0])[lane] != id)
      fault(warp, lane, "barrier", "threads of a warp name different barriers");
  }
  Barrier& barrier = barriers_[id];
  if (barrier.expected == 0) {
    barrier.expected = expected;
    barrier.pc = warp.current;
  } else if (barrier.expected != expected) {
    fault(warp, first, "barrier",
          "barrier " + std::to_string(id) + " for " + std::to_string(expected) + " threads; at " +
              place(barrier.pc) + " it was for " + std::to_string(barrier.expected));
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (insn.count == 1 && warp.wait[lane] == Wait::barrier && warp.barrier[lane] == id &&
        warp.pc[lane] != warp.current)
      fault(warp, first, "divergent barrier",
            "threads of one warp wait for barrier " + std::to_string(id) + " at " +
                place(warp.pc[lane]) + " too");
  barrier.arrived += static_cast<uint32_t>(__builtin_popcount(mask));
  history_.arrive(warp.index, barrier.clocks);
  if (insn.slots[2] != kNoSlot)
    barrier.votes += static_cast<uint32_t>(__builtin_popcount(
        (warp.predicate(insn.slots[2]) ^ (insn.immediate != 0 ? ~0u : 0u)) & mask));
  // Lanes that the last warp lacks come with its existing ones.
  if (warp.existing != kAllLanes && (mask >> __builtin_ctz(warp.existing) & 1) != 0)
    barrier.arrived += static_cast<uint32_t>(kLanes - __builtin_popcount(warp.existing));
  if (insn.mode == 1) {  // arrive does not wait
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
      warp.pc[__builtin_ctz(rest)] = warp.current + 1;
  } else {
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      warp.wait[lane] = Wait::barrier;
      warp.barrier[lane] = id;
    }
    warp.blocked |= mask;
  }
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
      if (insn.slots[3] != kNoSlot) {
        if (insn.mode == 2) {
          warp.words(insn.slots[3])[lane] = votes;
        } else {
          const uint32_t bit = 1u << lane;
          const bool holds = insn.mode == 3 ? votes == num_threads_ : votes != 0;
          uint32_t& predicate = warp.predicate(insn.slots[3]);
          predicate = holds ? predicate | bit : predicate & ~bit;
        }
      }
      warp.wait[lane] = Wait::none;
      warp.blocked &= ~(1u << lane);
      ++warp.pc[lane];
    }
    if (waited) history_.leave(warp.index, barriers_[id].clocks);
  }
  barriers_[id] = Barrier{};
}

void Block::report_deadlock() {
  std::string text = "every thread that has not exited waits";
  const Warp* first_warp = nullptr;
  int first_lane = 0;
  for (Warp& warp : warps_) {
    for (uint32_t rest = warp.alive; rest != 0;) {
      const int lane = __builtin_ctz(rest);
      uint32_t same = 0;
      for (uint32_t others = rest; others != 0; others &= others - 1) {
        const int other = __builtin_ctz(others);
        if (warp.pc[other] == warp.pc[lane]) same |= 1u << other;
      }
      rest &= ~same;
      if (first_warp == nullptr) {
        first_warp = &warp;
        first_lane = lane;
        warp.current = warp.pc[lane];
      }
      char lanes[32];
      std::snprintf(lanes, sizeof lanes, "0x%08x", same);
      text += "\n    warp " + std::to_string(warp.index) + " lanes " + lanes + " at " +
              place(warp.pc[lane]) + ": " + kernel().mnemonics[warp.pc[lane]];
      if (warp.wait[lane] == Wait::barrier) {
        const Barrier& barrier = barriers_[warp.barrier[lane]];
        text += ", barrier " + std::to_string(warp.barrier[lane]) + ", " +
                std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) +
                " threads";
      }
    }
    if (warp.alive != warp.existing) {
      char lanes[32];
      std::snprintf(lanes, sizeof lanes, "0x%08x", warp.existing & ~warp.alive);
      text += "\n    warp " + std::to_string(warp.index) + " lanes " + lanes + " have exited";
    }
  }
  fault(*first_warp, first_lane, "deadlock", text);
}

}  // namespace fajit::emulator
