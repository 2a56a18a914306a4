// The gradient of attention to the keys that a band mask names, from the log-sum-exp that the rows
// have over all their keys, these and others (arXiv 2205.14135): with P = exp(S - lse) and
// D = rowsum(dO * O),
//
//   dV = P' dO,   dS = P (dO V' - D),   dQ = scale dS K,   dK = scale dS' Q.
//
// Two passes share nothing but D, so that every output has one writer and one order of summation
// whatever the threads: by keys (dK and dV, where columns are the (token, head) rows of the runs
// that hold the keys) and by queries (dQ, where columns are keys). Both compute two small products
// per block, a row's columns being one contiguous range of them, and then sum over the columns in
// order.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "band_attention.h"
#include "pool.h"
#include "scratch.h"

struct KtBandAttentionGradArgs {
  const float* q;  // [tokens, heads, dim]
  const float* k;  // [keys, groups, dim]
  const float* v;
  const float* out;  // [tokens, heads, dim], as dout
  const float* dout;
  const float* lse;         // [tokens, heads]
  const kt::BandRun* runs;  // sorted by queries; equal query ranges follow each other
  float* dq;                // [tokens, heads, dim]; rows in no run are left as they are
  float* dk;                // [keys, groups, dim]; keys in no run are left as they are
  float* dv;
  int64_t tokens, num_runs, heads, groups, dim;
  float scale;
};

namespace kt {
namespace {

constexpr long kRows = 96;  // rows of a block

struct Task {
  const BandRun *runs, *end;  // among which are all that hold its keys; or those of its queries
  long group;
  long first, count;  // keys, or tokens of the query range
};

// Columns of a block: their two matrices as rows, and turned for the two products.
struct Columns {
  float *one, *two;                // [columns][width]
  float *turned_one, *turned_two;  // panels [dim][kPanel]
};

class Worker {
 public:
  Worker(const KtBandAttentionGradArgs* a, const float* delta, const Task& task)
      : a_(a), delta_(delta), task_(task), per_(a->heads / a->groups),
        width_(round_up(a->dim, 16)),
        chunk_(std::clamp(16384 / width_ / kSub * kSub, kSub, kChunk)) {
    thread_local Scratch scratch;
    const long rows = std::max(kRows, per_), stats = std::max(chunk_, round_up(rows, 16));
    scratch.get({{&one_, rows * width_}, {&two_, rows * width_},
                 {&p_, rows * kScoreStride}, {&ds_, rows * kScoreStride},
                 {&sum_one_, rows * width_}, {&sum_two_, rows * width_},
                 {&columns_.one, chunk_ * width_}, {&columns_.two, chunk_ * width_},
                 {&columns_.turned_one, chunk_ * width_}, {&columns_.turned_two, chunk_ * width_},
                 {&lse_, stats}, {&delta_of_, stats}});
  }

  // dK and dV of the block's keys.
  void keys() {
    for (long r = 0; r < task_.count; ++r)
      load_key(task_.first + r, one_ + r * a_->dim, two_ + r * a_->dim);
    clear(task_.count);
    for (const BandRun* run = task_.runs; run < task_.end; ++run) {
      const long offset = task_.first - run->k0;  // of the block in the run
      const long begin = std::max(0L, -offset), end = std::min(task_.count, run->keys() - offset);
      if (begin >= end) continue;
      const long last = run->query_end(offset + end - 1) * per_;
      for (long m = run->query_begin(offset + begin) * per_; m < last; m += chunk_) {
        const long n = std::min(chunk_, last - m);
        for (long i = 0; i < n; ++i)
          load_query(query_row(*run, m + i), i, columns_.one + i * width_,
                     columns_.two + i * width_);
        block<true>(begin, end, n, [&](long r) {
          return std::pair(run->query_begin(offset + r) * per_ - m,
                           run->query_end(offset + r) * per_ - m);
        });
      }
    }
    for (long r = 0; r < task_.count; ++r) {
      const long to = ((task_.first + r) * a_->groups + task_.group) * a_->dim;
      copy(sum_one_ + r * width_, a_->dk + to, 1.0f);
      copy(sum_two_ + r * width_, a_->dv + to, 1.0f);
    }
  }

  // dQ of the group's heads for the block's tokens.
  void queries() {
    const long rows = task_.count * per_;
    for (long r = 0; r < rows; ++r)
      load_query(query_row(*task_.runs, task_.first * per_ + r), r, one_ + r * a_->dim,
                 two_ + r * a_->dim);
    clear(rows);
    for (const BandRun* run = task_.runs; run < task_.end; ++run) {
      const long last = run->key_end(task_.first + task_.count - 1);
      for (long k = run->key_begin(task_.first); k < last; k += chunk_) {
        const long n = std::min(chunk_, last - k);
        for (long i = 0; i < n; ++i)
          load_key(run->k0 + k + i, columns_.one + i * width_, columns_.two + i * width_);
        block<false>(0, rows, n, [&](long r) {
          const long token = task_.first + r / per_;
          return std::pair(run->key_begin(token) - k, run->key_end(token) - k);
        });
      }
    }
    for (long r = 0; r < rows; ++r)
      copy(sum_one_ + r * width_,
           a_->dq + query_row(*task_.runs, task_.first * per_ + r) * a_->dim, a_->scale);
  }

  static long tokens_of_block(long per) { return std::max(1L, kRows / per); }

 private:
  // The m-th (token, head) row of the group in the run's queries, as a row of q.
  long query_row(const BandRun& run, long m) const {
    return (run.q0 + m / per_) * a_->heads + task_.group * per_ + m % per_;
  }

  void load_key(long key, float* one, float* two) const {
    const long from = (key * a_->groups + task_.group) * a_->dim;
    copy(a_->k + from, one, 1.0f);
    copy(a_->v + from, two, 1.0f);
  }

  // A row that has seen nothing brings zeros and, with a log-sum-exp of +inf, probabilities of 0.
  void load_query(long row, long at, float* one, float* two) {
    if (a_->lse[row] == -INFINITY) {
      std::fill_n(one, a_->dim, 0.0f);
      std::fill_n(two, a_->dim, 0.0f);
      lse_[at] = INFINITY;
      delta_of_[at] = 0.0f;
      return;
    }
    copy(a_->q + row * a_->dim, one, a_->scale);
    copy(a_->dout + row * a_->dim, two, 1.0f);
    lse_[at] = a_->lse[row];
    delta_of_[at] = delta_[row];
  }

  void copy(const float* from, float* to, float factor) const {
    for (long j = 0; j < a_->dim; j += 16)
      store_n(to + j, a_->dim - j, load_n(from + j, a_->dim - j) * set1(factor));
  }

  void clear(long rows) {
    std::fill_n(sum_one_, rows * width_, 0.0f);
    std::fill_n(sum_two_, rows * width_, 0.0f);
  }

  void turn(const float* from, long columns, float* to) const {
    long offset[16];
    for (long i = 0; i < columns; i += 16) {
      for (long j = 0; j < 16; ++j) offset[j] = std::min(i + j, columns - 1) * width_;
      turn_keys(from, offset, a_->dim, to + i / kPanel * kPanel * a_->dim + i % kPanel);
    }
  }

  // Adds what `columns` columns give to rows [begin, end); range(r) are the columns r meets.
  template <bool kByKeys, class Range>
  void block(long begin, long end, long columns, Range range) {
    turn(columns_.one, columns, columns_.turned_one);
    turn(columns_.two, columns, columns_.turned_two);
    for (long r = begin; r < end; r += kBlock) {
      const long height = std::min<long>(kBlock, end - r);
      const long from = std::max(range(r).first, 0L);
      const long upto = std::min(range(r + height - 1).second, columns);
      if (from >= upto) continue;
      const long first = from / 16, last = (upto + 15) / 16;
      float *p = p_ + r * kScoreStride, *ds = ds_ + r * kScoreStride;
      kScoreRows[height](one_ + r * a_->dim, columns_.turned_one, a_->dim, first, last, p);
      kScoreRows[height](two_ + r * a_->dim, columns_.turned_two, a_->dim, first, last, ds);
      for (long i = r; i < r + height; ++i) {
        const auto [lo, hi] = range(i);
        probabilities<kByKeys>(i, first * 16, last * 16, std::clamp(lo, 0L, columns),
                               std::clamp(hi, 0L, columns));
      }
      for (long j = 0; j < width_; j += kPanel) {
        const int vectors = int(std::min(kPanel, width_ - j) / 16);
        const auto rows_of = [&](const float* x) {
          return [=, this](long column) { return x + column * width_ + j; };
        };
        value_rows(int(height), vectors, ds, from, upto, rows_of(columns_.one),
                   sum_one_ + r * width_ + j, width_);
        if constexpr (kByKeys)
          value_rows(int(height), vectors, p, from, upto, rows_of(columns_.two),
                     sum_two_ + r * width_ + j, width_);
      }
    }
  }

  // p and ds of a row, from its two products in their place; zero outside [lo, hi).
  template <bool kByKeys>
  void probabilities(long r, long first, long last, long lo, long hi) {
    static constexpr float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 lane = load(lanes);
    float *p = p_ + r * kScoreStride, *ds = ds_ + r * kScoreStride;
    for (long i = first; i < last; i += 16) {
      const f32x16 lse = kByKeys ? load(lse_ + i) : set1(lse_[r]);
      const f32x16 delta = kByKeys ? load(delta_of_ + i) : set1(delta_of_[r]);
      f32x16 x = exp_down(load(p + i) - lse), y = x * (load(ds + i) - delta);
      if (i < lo || i + 16 > hi) {
        const f32x16 from = set1(float(lo - i)), upto = set1(float(hi - i));
        x = select_lt(lane, from, zero(), select_lt(lane, upto, x, zero()));
        y = select_lt(lane, from, zero(), select_lt(lane, upto, y, zero()));
      }
      store(p + i, x);
      store(ds + i, y);
    }
  }

  const KtBandAttentionGradArgs* a_;
  const float* delta_;
  const Task task_;
  const long per_, width_, chunk_;
  float *one_, *two_;          // [rows][dim]: what rows bring to the two products
  float *p_, *ds_;             // [rows][kScoreStride]
  float *sum_one_, *sum_two_;  // [rows][width]: dK and dV, or dQ
  float *lse_, *delta_of_;     // of the queries, rows or columns
  Columns columns_;
};

// Blocks of keys: `sorted` are the runs by their first key. Runs whose keys overlap, directly or
// through others, make a region; a document of a pack is one.
void plan_keys(const KtBandAttentionGradArgs* a, const std::vector<BandRun>& sorted,
               std::vector<Task>& tasks) {
  const BandRun* const last = sorted.data() + sorted.size();
  for (const BandRun *run = sorted.data(), *next; run < last; run = next) {
    long end = run->k1;
    for (next = run + 1; next < last && next->k0 < end; ++next)
      end = std::max<long>(end, next->k1);
    for (long k = run->k0; k < end; k += kRows)
      for (long g = 0; g < a->groups; ++g)
        tasks.push_back({run, next, g, k, std::min(kRows, end - k)});
  }
}

void plan_queries(const KtBandAttentionGradArgs* a, std::vector<Task>& tasks) {
  const long step = Worker::tokens_of_block(a->heads / a->groups);
  const BandRun* const end = a->runs + a->num_runs;
  for (const BandRun *runs = a->runs, *next; runs < end; runs = next) {
    next = end_of_range(runs, end);
    for (long t = 0; t < runs->queries(); t += step)
      for (long g = 0; g < a->groups; ++g)
        tasks.push_back({runs, next, g, t, std::min(step, runs->queries() - t)});
  }
}

void run(const KtBandAttentionGradArgs* a) {
  thread_local std::vector<BandRun> sorted;
  thread_local std::vector<Task> by_keys, by_queries;
  thread_local Scratch scratch;
  const long rows = a->tokens * a->heads;
  float* delta = scratch.get(rows);
  parallel_for((rows + 255) / 256, [=](long i, int) {
    for (long row = i * 256; row < std::min(rows, (i + 1) * 256); ++row) {
      f32x16 sum = zero();
      for (long j = 0; j < a->dim; j += 16)
        sum = fma(load_n(a->out + row * a->dim + j, a->dim - j),
                  load_n(a->dout + row * a->dim + j, a->dim - j), sum);
      delta[row] = reduce_add(sum);
    }
  });
  sorted.assign(a->runs, a->runs + a->num_runs);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const BandRun& x, const BandRun& y) { return x.k0 < y.k0; });
  by_keys.clear();
  by_queries.clear();
  plan_keys(a, sorted, by_keys);
  plan_queries(a, by_queries);
  const Task *keys = by_keys.data(), *queries = by_queries.data();
  const long n = long(by_keys.size());
  parallel_for(n + long(by_queries.size()), [=](long i, int) {
    if (i < n)
      Worker(a, delta, keys[i]).keys();
    else
      Worker(a, delta, queries[i - n]).queries();
  });
}

}  // namespace
}  // namespace kt

extern "C" void kt_band_attention_grad(const KtBandAttentionGradArgs* a) { kt::run(a); }
