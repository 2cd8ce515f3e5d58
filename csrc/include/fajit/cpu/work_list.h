// The items of work that one call does, which several threads may share.
#pragma once
#include <fajit/abi.h>

namespace fajit {

// The items of list `worker`, or all items without lists. Items are claimed as they are processed,
// because several threads may process one list.
class WorkList {
 public:
  explicit WorkList(const fajit_args* a)
      : cursor_(a->cursors == nullptr ? &own_cursor_ : a->cursors + a->worker) {
    const bool listed = a->cursors != nullptr;
    begin_ = a->work;
    count_ = a->num_work;
    if (!listed) return;
    begin_ += a->worker_indptr[a->worker];
    count_ = a->worker_indptr[a->worker + 1] - a->worker_indptr[a->worker];
  }
  WorkList(const WorkList&) = delete;
  WorkList& operator=(const WorkList&) = delete;

  static bool is_valid(const fajit_args* a) {
    if (a->work == nullptr) return false;
    return a->cursors == nullptr ||
           (a->worker_indptr != nullptr && a->worker >= 0 && a->worker < a->num_workers);
  }
  bool is_done() const { return __atomic_load_n(cursor_, __ATOMIC_RELAXED) >= count_; }

  // The next items; null if all are claimed. together(first, left): how many of the `left` items
  // from `first` on are claimed at once, which becomes `items`.
  template <class Together>
  const fajit_work* take(int& items, Together together) {
    int32_t at = __atomic_load_n(cursor_, __ATOMIC_RELAXED);
    while (at < count_) {
      const fajit_work* first = begin_ + at;
      items = together(first, count_ - at);
      // Fails if another thread has moved the cursor, and then loads it.
      if (__atomic_compare_exchange_n(cursor_, &at, at + items, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED))
        return first;
    }
    return nullptr;
  }

  // The item after those that were taken, which another thread may do; null at the end.
  const fajit_work* after(const fajit_work* taken, int items) const {
    return taken + items < begin_ + count_ ? taken + items : nullptr;
  }

 private:
  int32_t own_cursor_ = 0;
  int32_t* cursor_;
  const fajit_work* begin_;
  int32_t count_;
};

}  // namespace fajit
