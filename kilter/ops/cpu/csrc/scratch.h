// 64-byte aligned memory that only grows, for use as a thread_local.
#pragma once
#include <cstdlib>
#include <initializer_list>
#include <memory>

namespace kt {

constexpr long round_up(long n, long m) { return (n + m - 1) / m * m; }

class Scratch {
 public:
  float* get(long floats) {
    if (size_ < floats) {
      size_ = round_up(floats, 16);
      memory_.reset();
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, size_t(size_) * 4)));
    }
    return memory_.get();
  }

  struct Part {
    float** at;
    long floats;
  };

  // Several arrays, each aligned.
  void get(std::initializer_list<Part> parts) {
    long total = 0;
    for (const Part& part : parts) total += round_up(part.floats, 16);
    float* memory = get(total);
    for (const Part& part : parts) {
      *part.at = memory;
      memory += round_up(part.floats, 16);
    }
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  long size_ = 0;
};

}  // namespace kt
