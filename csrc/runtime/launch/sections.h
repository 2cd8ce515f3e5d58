// Sections of a block of memory, each at a multiple of 16 bytes, and the layout of a workspace.
#pragma once

#include <cstdint>
#include <cstring>

namespace fajit::runtime {

constexpr int64_t kSectionAlignment = 16;
constexpr int64_t kWorkspaceAlignment = 64;

inline int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Assigns offsets to sections.
class SectionLayout {
 public:
  int64_t add(int64_t bytes) {
    const int64_t begin = end_;
    end_ = round_up(begin + bytes, kSectionAlignment);
    return begin;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

inline void put_section(char* block, int64_t begin, const void* source, int64_t bytes) {
  if (bytes > 0) std::memcpy(block + begin, source, static_cast<size_t>(bytes));
}

// partial_out [rows, head_dim_v], then partial_lse [rows], fp32.
struct WorkspaceLayout {
  int64_t lse_begin = 0, bytes = 0;

  WorkspaceLayout() = default;
  WorkspaceLayout(int64_t rows, int32_t head_dim_v) {
    lse_begin = round_up(rows * head_dim_v * int64_t{sizeof(float)}, kWorkspaceAlignment);
    bytes = rows > 0 ? lse_begin + rows * int64_t{sizeof(float)} : 0;
  }
};

}  // namespace fajit::runtime
