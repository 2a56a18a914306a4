// A run of a band mask, as the rows of `Bands.runs` in kilter/ops/band_attention.py lie in memory.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kt {

// Query q0 + i sees key k0 + j where low <= j - i <= high. What a query sees is one range of the
// run's keys, what a key is seen by one range of its queries; both move up with i and j.
struct BandRun {
  int64_t q0, q1, k0, k1, low, high;

  long queries() const { return long(q1 - q0); }
  long keys() const { return long(k1 - k0); }
  long key_begin(long i) const { return std::clamp<long>(i + low, 0, keys()); }
  long key_end(long i) const { return std::clamp<long>(i + high + 1, 0, keys()); }
  long query_begin(long j) const { return std::clamp<long>(j - high, 0, queries()); }
  long query_end(long j) const { return std::clamp<long>(j - low + 1, 0, queries()); }
};

// The end of the runs that have the query range of `run`, which follow it.
inline const BandRun* end_of_range(const BandRun* run, const BandRun* end) {
  const BandRun* next = run + 1;
  while (next < end && next->q0 == run->q0 && next->q1 == run->q1) ++next;
  return next;
}

}  // namespace kt
