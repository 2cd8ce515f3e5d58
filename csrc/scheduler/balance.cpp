#include "balance.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace fajit::scheduler {
namespace {

// Up to this ratio of the longest worker's load to the mean, no better assignment is searched for.
constexpr double kGood = 1.035;
// Shares (maximum loads of a worker) to try, relative to the mean. Cuts are at multiples of
// tile_kv, so a full worker has up to one tile less than the share, and the others must have room
// for that.
constexpr double kShares[] = {1.005, 1.02, 1.04, 1.06, 1.08, 1.11, 1.15, 1.2, 1.3, 1.5};
// With splits, the end must be at most this part of the end without; and the merge must be paid
// for.
constexpr double kLeastGain = 0.97;
constexpr double kExcess = 0.03;        // part of a share that may be exceeded without a cut
constexpr double kReplicaLoss = 1.035;  // accepted loss of planning for one kv head only
// Few rows of all kv heads are one worker's, unless workers with heads of their own end earlier by
// this much of the time of few rows: the heads of a token follow each other in memory, which each
// worker would read in pieces from every page. 8 requests of 4,096 keys and 8 heads of 128 bf16
// took 1.2 times as long with 4 heads a thread (2 threads of a Xeon, pages of 16, by hand).
constexpr double kPiecesLoss = 0.25;
constexpr int kSweeps = 8;  // passes over all cuts in even_out()
// Parts of the whole cost that come last and are assigned longest first, whatever their keys, to
// try: see Spreader::by_sections.
constexpr double kTails[] = {0.1, 0.25, 0.5};
constexpr double kEven = 1.01;  // the ratio up to which a shorter tail is taken

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// A heap of the loads of workers, the smallest on top; equal loads by worker number.
class Workers {
 public:
  explicit Workers(int32_t count) : heap_(static_cast<size_t>(count)) {
    for (int32_t i = 0; i < count; ++i) heap_[static_cast<size_t>(i)] = {0.0, i};
  }
  double least() const { return heap_[0].load; }
  int32_t worker() const { return heap_[0].worker; }
  void add(double cost) {
    Entry entry{heap_[0].load + cost, heap_[0].worker};
    const size_t count = heap_.size();
    size_t i = 0;
    for (size_t child = 1; child < count; child = 2 * i + 1) {
      if (child + 1 < count && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < entry)) break;
      heap_[i] = heap_[child];
      i = child;
    }
    heap_[i] = entry;
  }
  std::vector<double> loads() const {
    std::vector<double> out(heap_.size());
    for (const Entry& entry : heap_) out[static_cast<size_t>(entry.worker)] = entry.load;
    return out;
  }

 private:
  struct Entry {
    double load;
    int32_t worker;
    bool operator<(const Entry& other) const {
      return load < other.load || (load == other.load && worker < other.worker);
    }
  };
  std::vector<Entry> heap_;
};

// Indices of `costs`, longest first, in a stable radix sort with buckets of `most` / 4096; costs
// above `most` are not ordered among each other.
std::vector<int32_t> longest_first(const std::vector<double>& costs, double most) {
  constexpr int kDigitBits = 6;
  constexpr int32_t kDigits = 1 << kDigitBits, kBuckets = kDigits * kDigits;
  const size_t count = costs.size();
  std::vector<int32_t> bucket(count), out(count), sorted(count);
  const double scale = most > 0 ? static_cast<double>(kBuckets - 1) / most : 0;
  for (size_t i = 0; i < count; ++i) {
    const double level = std::min(costs[i] * scale, static_cast<double>(kBuckets - 1));
    bucket[i] = kBuckets - 1 - static_cast<int32_t>(level);
  }
  std::iota(sorted.begin(), sorted.end(), 0);
  for (int shift = 0; shift < 2 * kDigitBits; shift += kDigitBits) {
    const auto digit = [&](int32_t i) {
      return static_cast<size_t>(bucket[static_cast<size_t>(i)] >> shift & (kDigits - 1));
    };
    int32_t first[kDigits + 1] = {};
    for (const int32_t i : sorted) ++first[digit(i) + 1];
    std::partial_sum(first, first + kDigits, first);
    for (const int32_t i : sorted) out[static_cast<size_t>(first[digit(i)]++)] = i;
    out.swap(sorted);
  }
  return sorted;
}

// Until the last worker ends, where `share` of the workers saturate the memory. `load_ns` holds
// their loads while all N are active; while n are, each is N / n times as fast, but at most
// 1 / share times. All have the same rate, so a piece of load that n workers still have takes
// max(n / N, share) of its time. The latency of a worker's first item, `item_ns`, does not depend
// on the other workers; during those of later items others use the bandwidth, so they are load.
double end_of(std::vector<double> load_ns, double item_ns, double share) {
  const double workers = static_cast<double>(load_ns.size());
  double longest = 0, sum = 0;
  for (double& load : load_ns) {
    load = std::max(load - item_ns, 0.0);
    longest = std::max(longest, load);
  }
  if (longest == 0) return 0;
  const double saturating = std::clamp(std::ceil(share * workers), 1.0, workers);
  const auto last = load_ns.begin() + (static_cast<std::ptrdiff_t>(saturating) - 1);
  std::nth_element(load_ns.begin(), last, load_ns.end(), std::greater<>());
  const double level = *last;  // up to here, enough are active to saturate the memory
  for (const double load : load_ns) sum += std::min(load, level);
  return item_ns + sum / workers + share * (longest - level);
}

struct Spread {
  std::vector<Part> parts;  // in the order of assignment
  std::vector<double> load_ns;
  double total_ns = 0, critical_ns = 0;  // critical_ns: the longest load
  double end_ns = 0;                     // of the spread that is taken
  bool is_cut = false;

  void finish() {
    for (const double load : load_ns) {
      total_ns += load;
      critical_ns = std::max(critical_ns, load);
    }
  }
  double mean_ns() const { return total_ns / static_cast<double>(load_ns.size()); }
};

constexpr int kFewRows = 1;  // kind of units

// Assigns the units of some kv heads to some workers.
class Spreader {
 public:
  // kind: as of balance(). cached_keys: of one kv head, how many a cache holds for these workers.
  // bundles: whether the heads of few-row units stay together.
  Spreader(const std::vector<Unit>& units, const std::vector<int32_t>& ids, int kind,
           const Kind (&kinds)[2], const PlanOptions& options, int32_t heads, int32_t workers,
           double cached_keys, bool bundles = false)
      : units_(units),
        ids_(ids),
        item_ns_(kind < 0 ? 0 : kinds[kind].item_ns),
        share_(kind < 0 ? 1 : kinds[kind].saturating_share()),
        kinds_(kinds),
        options_(options),
        heads_(heads),
        num_workers_(workers),
        cached_keys_(cached_keys),
        bundle_(bundles ? heads : 1) {}

  Spread spread() {
    Spread taken = options_.batch_invariant ? fixed_parts() : best_parts();
    taken.end_ns = end_of_last(taken);
    if (bundle_ > 1) open_bundles(taken);
    return taken;
  }

 private:
  // A unit for some of the kv heads, or their bundles, in the order of assignment.
  struct Turn {
    int32_t at;  // in ids_
    int32_t head_begin, head_end;
  };

  // Heads that one part of a unit is for.
  int32_t together(const Unit& unit) const { return unit.kind == kFewRows ? bundle_ : 1; }

  // Makes parts of single heads of those of bundles, one after another.
  void open_bundles(Spread& spread) const {
    std::vector<Part> parts;
    parts.reserve(spread.parts.size() * static_cast<size_t>(bundle_));
    for (Part part : spread.parts) {
      const int32_t heads = together(units_[static_cast<size_t>(part.unit)]);
      part.cost_ns /= static_cast<float>(heads);
      for (int32_t i = 0; i < heads; ++i) {
        parts.push_back(part);
        parts.back().head += i;
      }
    }
    spread.parts = std::move(parts);
  }

  // At most the longest load: with fewer active workers each is faster.
  double end_of_last(const Spread& spread) const {
    return share_ < 1 ? end_of(spread.load_ns, item_ns_, share_) : spread.critical_ns;
  }

  // Cuts as many units as pay.
  Spread best_parts() {
    std::vector<double> costs;
    costs.reserve(ids_.size());
    double total = 0, longest = 0, least_share = 0;
    for (const int32_t id : ids_) {
      const Unit& unit = units_[static_cast<size_t>(id)];
      const int32_t heads = together(unit);
      const double cost = heads * (unit.cost_ns + (unit.shared ? state_ns(unit) : 0));
      costs.push_back(cost);
      total += cost * (heads_ / heads);
      if (cost <= longest) continue;
      longest = cost;
      // n parts take cost / n, at the rate of workers that do not share the bandwidth, and the
      // merge reads n states: the sum is minimal where both are equal.
      least_share = std::sqrt(cost * heads * kinds_[unit.kind].state_ns / share_);
    }
    const double mean = total / num_workers_;
    for (const double tail : kTails) {
      order_ = by_sections(costs, total, tail);
      if (order_.empty()) break;
      Spread sections = assign(kNoLimit);
      if (sections.critical_ns <= (tail < 0.5 ? kEven : kGood) * mean) return sections;
    }
    order_.clear();
    for (const int32_t at : longest_first(costs, std::min(longest, 2 * mean)))
      order_.push_back({at, 0, heads_ / together(unit_at(static_cast<size_t>(at)))});
    Spread best = assign(kNoLimit);
    if (num_workers_ == 1 || best.critical_ns <= kGood * mean) return best;
    // Under limits the merge is launched anyway.
    const double merge_ns = options_.limits.max_requests > 0 ? 0 : options_.merge_ns;
    const double whole = end_of_last(best);
    const double least = std::min(kLeastGain * whole, whole - merge_ns);
    if (least <= mean) return best;  // no assignment ends before the mean
    double before = total;           // total with the cuts of the last attempt
    bool gains = false;
    for (const double share : kShares) {
      const double most = std::max(before / num_workers_ * share, least_share);
      if (most >= best.critical_ns) break;
      Spread next = assign(most);
      if (!next.is_cut) break;
      before = next.total_ns;
      const bool good = next.critical_ns <= kGood * next.mean_ns();
      // How many workers saturate the memory decides whether to cut; cuts then balance the loads.
      if ((!gains || next.critical_ns < best.critical_ns) &&
          (next.critical_ns < least || end_of_last(next) < least)) {
        best = std::move(next);
        gains = true;
      }
      if (good) break;
    }
    return best;
  }

  // An order in which workers are at the same requests and heads at any time: sections of as many
  // keys as the cache holds, longest first within a section. The last sections, which are `tail` of
  // the cost, are one, so that the loads even out. Empty if the keys fit the cache. Longest first
  // throughout, all heads are read at the same time again and again: a causal prefill of 256 heads
  // of 1024 keys on an H100 took 1.3 times as long.
  std::vector<Turn> by_sections(const std::vector<double>& costs, double total, double tail) const {
    struct Placed {
      int32_t section;
      double cost;
      Turn turn;
    };
    if (cached_keys_ == kNoLimit) return {};
    std::vector<Placed> placed;
    int32_t section = 0;
    double held = 0, before = 0;  // keys of the section so far; cost of the earlier ones
    const auto next_section = [&] {
      if (held == 0) return;
      held = 0;
      if (before < (1 - tail) * total) ++section;
    };
    for (size_t begin = 0, end = 0; begin < ids_.size(); begin = end) {
      const Unit& first = unit_at(begin);
      double keys = 0, cost = 0;
      while (end < ids_.size() && unit_at(end).entity == first.entity &&
             unit_at(end).head == first.head) {
        const Extent& extent = unit_at(end).extent;
        keys = std::max(keys, static_cast<double>(extent.end - extent.begin));
        cost += costs[end++];
      }
      const double most = std::clamp(std::floor(cached_keys_ / std::max(keys, 1.0)), 1.0,
                                     static_cast<double>(heads_));
      const int32_t each = static_cast<int32_t>(most);
      for (int32_t head = 0; head < heads_; head += each) {
        const int32_t count = std::min(each, heads_ - head);
        if (held + keys * count > cached_keys_) next_section();
        held += keys * count;
        before += cost * count;
        for (size_t i = begin; i < end; ++i) {
          placed.push_back({section, costs[i], {static_cast<int32_t>(i), head, head + count}});
        }
      }
    }
    if (section == 0) return {};
    std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
      return a.section < b.section || (a.section == b.section && a.cost > b.cost);
    });
    std::vector<Turn> turns;
    turns.reserve(placed.size());
    for (const Placed& one : placed) turns.push_back(one.turn);
    return turns;
  }

  double state_ns(const Unit& unit) const { return unit.rows() * kinds_[unit.kind].state_ns; }
  const Unit& unit_at(size_t i) const { return units_[static_cast<size_t>(ids_[i])]; }

  // Assigns each unit to the least loaded worker. A unit that would raise its load above `most` is
  // cut there, once per worker, and the rest goes to the next worker. The kv heads of a turn follow
  // each other, so no other unit starts between them: without sections, a page, which holds the
  // keys of all heads, is read whole at one time.
  Spread assign(double most) const {
    Spread out;
    out.parts.reserve(ids_.size() * static_cast<size_t>(heads_) +
                      static_cast<size_t>(num_workers_));
    Workers workers(num_workers_);
    std::vector<char> has_cut(static_cast<size_t>(num_workers_), 0);
    for (const Turn& turn : order_) {
      const int32_t id = ids_[static_cast<size_t>(turn.at)];
      const Unit& unit = units_[static_cast<size_t>(id)];
      const double heads = together(unit), key_ns = heads * unit.key_ns;
      for (int32_t head = turn.head_begin; head < turn.head_end; ++head) {
        Part part{id, head, unit.extent.begin, unit.extent.end, 0, 0};
        double fixed = heads * (kinds_[unit.kind].item_ns + (unit.shared ? state_ns(unit) : 0));
        double rest = heads * (unit.cost_ns - kinds_[unit.kind].item_ns);
        if (workers.least() + fixed + rest <= most) {
          take(part, fixed + rest, workers, out);
          continue;
        }
        // The rest of a cut goes to a worker with no smaller load, and costs this much more there.
        const double another = heads * (kinds_[unit.kind].item_ns + state_ns(unit));
        // Cuts are rounded to tiles, which even_out() corrects.
        const double excess =
            std::max(std::min(another, kExcess * most), 0.5 * kinds_[unit.kind].tile_kv * key_ns);
        while (workers.least() + fixed + rest > most + excess) {
          char& cut = has_cut[static_cast<size_t>(workers.worker())];
          const double room = most + excess - workers.least() - another;
          const int32_t end = cut ? 0 : cut_point(unit, part.kv_begin, room / heads);
          if (end == 0) break;
          fixed = another;
          const double taken =
              static_cast<double>(unit.extent.visited(part.kv_begin, end)) * key_ns;
          cut = 1;
          out.is_cut = true;
          part.kv_end = end;
          take(part, fixed + taken, workers, out);
          part.kv_begin = end;
          part.kv_end = unit.extent.end;
          rest -= taken;
        }
        take(part, fixed + rest, workers, out);
      }
    }
    out.load_ns = workers.loads();
    if (out.is_cut) even_out(out);
    out.finish();
    return out;
  }

  // Moves cuts by whole tiles so that the two workers that share a cut unit are equally loaded.
  // This also spreads the imbalance left by the last units.
  void even_out(Spread& spread) const {
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      bool moved = false;
      for (size_t i = 0; i + 1 < spread.parts.size(); ++i) {
        Part &first = spread.parts[i], &second = spread.parts[i + 1];
        if (first.unit != second.unit || first.head != second.head) continue;
        const Unit& unit = units_[static_cast<size_t>(first.unit)];
        const Kind& kind = kinds_[unit.kind];
        const double tile_ns = together(unit) * kind.tile_kv * unit.key_ns;
        if (unit.extent.cell > 0 || tile_ns <= 0) continue;  // tiles are not equally expensive
        double& load = spread.load_ns[static_cast<size_t>(first.worker)];
        double& other = spread.load_ns[static_cast<size_t>(second.worker)];
        // Tiles that a part can give away, down to its minimum length.
        const auto spare = [&](const Part& part) {
          return static_cast<double>((part.kv_end - part.kv_begin - kind.min_chunk) / kind.tile_kv);
        };
        const double tiles = std::clamp(std::round((load - other) / (2 * tile_ns)),
                                        -std::max(spare(second), 0.0), std::max(spare(first), 0.0));
        if (tiles == 0 || first.worker == second.worker) continue;
        first.kv_end = second.kv_begin -= static_cast<int32_t>(tiles) * kind.tile_kv;
        first.cost_ns -= static_cast<float>(tiles * tile_ns);
        second.cost_ns += static_cast<float>(tiles * tile_ns);
        load -= tiles * tile_ns;
        other += tiles * tile_ns;
        moved = true;
      }
      if (!moved) break;
    }
  }

  static void take(Part& part, double cost, Workers& workers, Spread& out) {
    part.worker = workers.worker();
    part.cost_ns = static_cast<float>(cost);
    workers.add(cost);
    out.parts.push_back(part);
  }

  // Where to cut a unit's keys from `begin` on, so that the first part costs at most `room` or has
  // the minimum length; 0 if the parts would be too short.
  int32_t cut_point(const Unit& unit, int32_t begin, double room) const {
    const Kind& kind = kinds_[unit.kind];
    const int32_t tile = kind.tile_kv, end = unit.extent.end;
    if (end - begin < 2 * int64_t{kind.min_chunk}) return 0;
    const auto down = [&](int64_t key) {
      return static_cast<int32_t>(unit.origin + (key - unit.origin) / tile * tile);
    };
    const int64_t keys =
        room > 0 ? static_cast<int64_t>(std::min(room / std::max(unit.key_ns, 1e-9), 2147483647.0))
                 : 0;
    const int32_t least = down(int64_t{begin} + kind.min_chunk + tile - 1);
    const int32_t most = down(int64_t{end} - kind.min_chunk);
    const int32_t cut = std::min(std::max(down(unit.extent.reach(begin, keys)), least), most);
    return cut > begin && cut >= least && cut < end ? cut : 0;
  }

  // Splits every unit in parts that depend on the unit alone (batch-invariant mode).
  Spread fixed_parts() const {
    Spread out;
    std::vector<Part> parts;
    std::vector<double> costs;
    double total = 0, longest = 0;
    for (const int32_t id : ids_) {
      const Unit& unit = units_[static_cast<size_t>(id)];
      const Kind& kind = kinds_[unit.kind];
      const int32_t split = options_.split_keys[unit.kind];
      const size_t first = parts.size();
      Part part{id, 0, unit.extent.begin, unit.extent.end, 0, 0};
      while (split > 0) {
        const int64_t next =
            unit.origin + ((int64_t{part.kv_begin} - unit.origin) / split + 1) * split;
        if (next >= unit.extent.end) break;
        part.kv_end = static_cast<int32_t>(next);
        parts.push_back(part);
        part.kv_begin = part.kv_end;
      }
      part.kv_end = unit.extent.end;
      parts.push_back(part);
      out.is_cut |= parts.size() > first + 1;
      const bool writes_state = unit.shared || parts.size() > first + 1;
      for (size_t i = first; i < parts.size(); ++i) {
        const int64_t keys = unit.extent.visited(parts[i].kv_begin, parts[i].kv_end);
        const double cost =
            together(unit) * (kind.item_ns + static_cast<double>(keys) * unit.key_ns +
                              (writes_state ? state_ns(unit) : 0));
        costs.push_back(cost);
        total += cost * (heads_ / together(unit));
        longest = std::max(longest, cost);
      }
    }
    Workers workers(num_workers_);
    for (const int32_t at : longest_first(costs, std::min(longest, 2 * total / num_workers_))) {
      Part part = parts[static_cast<size_t>(at)];
      const int32_t bundles = heads_ / together(units_[static_cast<size_t>(part.unit)]);
      for (part.head = 0; part.head < bundles; ++part.head) {
        take(part, costs[static_cast<size_t>(at)], workers, out);
      }
    }
    out.load_ns = workers.loads();
    out.finish();
    return out;
  }

  const std::vector<Unit>& units_;
  const std::vector<int32_t>& ids_;
  const double item_ns_, share_;  // see end_of(); a share of 1 if the workers run both kinds
  const Kind (&kinds_)[2];
  const PlanOptions& options_;
  const int32_t heads_, num_workers_;
  const double cached_keys_;
  const int32_t bundle_;  // heads of few-row units that are assigned as one
  std::vector<Turn> order_;
};

// Numbers the parts by unit, head and keys.
Balance numbered(Spread spread, size_t num_units, int32_t heads, int32_t replicas) {
  Balance out;
  out.heads = heads;
  out.workers = static_cast<int32_t>(spread.load_ns.size());
  out.replicas = replicas;
  out.load_ns = std::move(spread.load_ns);
  out.end_ns = spread.end_ns;
  const size_t count = spread.parts.size();
  const size_t jobs = num_units * static_cast<size_t>(heads);
  out.first_part.assign(jobs + 1, 0);
  const auto job = [&](const Part& part) {
    return static_cast<size_t>(part.unit) * static_cast<size_t>(heads) +
           static_cast<size_t>(part.head);
  };
  for (const Part& part : spread.parts) ++out.first_part[job(part) + 1];
  std::partial_sum(out.first_part.begin(), out.first_part.end(), out.first_part.begin());
  out.parts.resize(count);
  out.order.resize(count);
  // In batch-invariant mode the parts of a cut unit were assigned in any order: sort them by keys,
  // then look up their numbers.
  std::vector<int32_t> placed(spread.is_cut ? jobs : 0, 0);
  for (size_t i = 0; i < count; ++i) {
    const Part& part = spread.parts[i];
    const size_t at = job(part);
    out.order[i] = out.first_part[at] + (spread.is_cut ? placed[at]++ : 0);
    out.parts[static_cast<size_t>(out.order[i])] = part;
  }
  if (!spread.is_cut) return out;
  const auto earlier = [](const Part& a, const Part& b) { return a.kv_begin < b.kv_begin; };
  for (size_t j = 0; j < jobs; ++j) {
    const auto begin = out.parts.begin() + out.first_part[j];
    const auto end = out.parts.begin() + out.first_part[j + 1];
    if (end - begin > 1) std::sort(begin, end, earlier);
  }
  for (size_t i = 0; i < count; ++i) {
    const size_t at = job(spread.parts[i]);
    const auto begin = out.parts.begin() + out.first_part[at];
    const auto end = out.parts.begin() + out.first_part[at + 1];
    out.order[i] = static_cast<int32_t>(std::lower_bound(begin, end, spread.parts[i], earlier) -
                                        out.parts.begin());
  }
  return out;
}

}  // namespace

Balance balance(const std::vector<Unit>& units, int kind, const Kind (&kinds)[2],
                const PlanOptions& options, int32_t num_workers) {
  std::vector<int32_t> ids;
  ids.reserve(units.size());
  bool per_head = false;
  double total = 0, few_total = 0;  // of one kv head, without cuts
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i].dropped || (kind >= 0 && units[i].kind != kind)) continue;
    ids.push_back(static_cast<int32_t>(i));
    per_head |= units[i].head >= 0;
    total += units[i].cost_ns;
    if (units[i].kind == kFewRows) few_total += units[i].cost_ns;
  }
  const int32_t all_heads = per_head ? 1 : options.num_kv_heads;
  const int32_t replicas = per_head ? 1 : std::gcd(all_heads, num_workers);
  const int32_t heads = all_heads / replicas;
  // Few rows read each key once, and the kv heads of a page together.
  const double cached = kind == 0 && kinds[0].cached_keys > 0 ? kinds[0].cached_keys : kNoLimit;
  const auto spread_over = [&](int32_t own_heads, int32_t workers, double keys, bool bundles) {
    return Spreader(units, ids, kind, kinds, options, own_heads, workers, keys, bundles).spread();
  };
  const bool bundles = options.share_workers && !options.heads_apart && few_total > 0 &&
                       all_heads > 1 && num_workers > 1;
  const auto end_with_merge = [&](const Spread& spread) {
    return spread.end_ns +
           (spread.is_cut && options.limits.max_requests == 0 ? options.merge_ns : 0);
  };
  Spread bundled;
  double allowed = 0;  // of time, to keep heads together
  if (bundles) {
    const double parallel = static_cast<double>(all_heads) / num_workers;
    allowed = kPiecesLoss * parallel * few_total;
    bundled = spread_over(all_heads, num_workers, cached, true);
    // No other plan ends before the mean without cuts.
    if (end_with_merge(bundled) <= parallel * total + allowed)
      return numbered(std::move(bundled), units.size(), all_heads, 1);
  }
  int32_t used = replicas;
  Spread best = spread_over(heads, num_workers / replicas, cached / replicas, false);
  // With few units, planning all heads together may balance better.
  if (replicas > 1 && best.end_ns > kReplicaLoss * best.mean_ns() &&
      ids.size() * static_cast<size_t>(all_heads) <= 2 * static_cast<size_t>(num_workers)) {
    Spread whole = spread_over(all_heads, num_workers, cached, false);
    if (whole.end_ns * kReplicaLoss < best.end_ns) {
      best = std::move(whole);
      used = 1;
    }
  }
  if (bundles && end_with_merge(bundled) <= end_with_merge(best) + allowed) {
    best = std::move(bundled);
    used = 1;
  }
  return numbered(std::move(best), units.size(), all_heads / used, used);
}

}  // namespace fajit::scheduler
