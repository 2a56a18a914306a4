// The gradient of causal attention over a batch's own keys, from the log-sum-exp of its rows
// (arXiv 2205.14135): with P = exp(S - lse) and D = rowsum(dO * O),
//
//   dV = P' dO,   dS = P (dO V' - D),   dQ = scale dS K,   dK = scale dS' Q.
//
// Two passes share nothing but D, so that every output has one writer and one order of summation
// whatever the threads: by keys (dK and dV, where columns are the (token, head) rows that see
// them) and by queries (dQ, where columns are keys). Both compute two small products per block, a
// row's columns being one contiguous range of them, and then sum over the columns in order.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "pool.h"
#include "scratch.h"

struct KtAttentionGradArgs {
  const float* q;  // [tokens, heads, dim]
  const float* k;  // [tokens, groups, dim]
  const float* v;
  const float* out;  // [tokens, heads, dim], as dout
  const float* dout;
  const float* lse;           // [tokens, heads]
  const int32_t* cu_seqlens;  // [seqs + 1]
  float* dq;                  // [tokens, heads, dim]
  float* dk;                  // [tokens, groups, dim]
  float* dv;
  int64_t tokens, seqs, heads, groups, dim;
  int64_t window;  // 0: none
  float scale;
};

namespace kt {
namespace {

constexpr long kRows = 96;  // rows of a block

struct Task {
  long seq, group, first;  // the block's first key, or first query token, in its sequence
};

// Columns of a block: their two matrices as rows, and turned for the two products.
struct Columns {
  float *one, *two;                // [columns][width]
  float *turned_one, *turned_two;  // panels [dim][kPanel]
};

class Worker {
 public:
  Worker(const KtAttentionGradArgs* a, const float* delta, const Task& task)
      : a_(a), delta_(delta), task_(task), per_(a->heads / a->groups),
        width_(round_up(a->dim, 16)), chunk_(std::clamp(16384 / width_ / kSub * kSub, kSub, kChunk)),
        start_(a->cu_seqlens[task.seq]), length_(a->cu_seqlens[task.seq + 1] - start_) {
    thread_local Scratch scratch;
    const long rows = std::max(kRows, per_), stats = std::max(chunk_, round_up(rows, 16));
    const std::pair<float**, long> parts[] = {
        {&one_, rows * width_},          {&two_, rows * width_},
        {&p_, rows * kScoreStride},      {&ds_, rows * kScoreStride},
        {&sum_one_, rows * width_},      {&sum_two_, rows * width_},
        {&columns_.one, chunk_ * width_},        {&columns_.two, chunk_ * width_},
        {&columns_.turned_one, chunk_ * width_}, {&columns_.turned_two, chunk_ * width_},
        {&lse_, stats},                  {&delta_of_, stats}};
    long total = 0;
    for (const auto& part : parts) total += part.second;
    float* memory = scratch.get(total);
    for (const auto& [part, size] : parts) {
      *part = memory;
      memory += size;
    }
  }

  // dK and dV of keys [first, first + kRows).
  void keys() {
    const long rows = std::min(kRows, length_ - task_.first);
    for (long r = 0; r < rows; ++r) {
      copy(key(task_.first + r), one_ + r * a_->dim, 1.0f);
      copy(value(task_.first + r), two_ + r * a_->dim, 1.0f);
    }
    clear(rows);
    const long seen = a_->window ? std::min(length_, task_.first + rows - 1 + a_->window) : length_;
    for (long m = task_.first * per_; m < seen * per_; m += chunk_) {
      const long n = std::min(chunk_, seen * per_ - m);
      for (long i = 0; i < n; ++i) {
        const long row = query_row(m + i);
        copy(a_->q + row * a_->dim, columns_.one + i * width_, a_->scale);
        copy(a_->dout + row * a_->dim, columns_.two + i * width_, 1.0f);
        lse_[i] = a_->lse[row];
        delta_of_[i] = delta_[row];
      }
      block<true>(rows, n, [&](long r) {
        const long token = task_.first + r;
        return std::pair(token * per_ - m,
                         (a_->window ? std::min(length_, token + a_->window) : length_) * per_ - m);
      });
    }
    for (long r = 0; r < rows; ++r) {
      const long to = ((start_ + task_.first + r) * a_->groups + task_.group) * a_->dim;
      copy(sum_one_ + r * width_, a_->dk + to, 1.0f);
      copy(sum_two_ + r * width_, a_->dv + to, 1.0f);
    }
  }

  // dQ of the group's heads for tokens from `first`.
  void queries() {
    const long tokens = std::min(tokens_of_block(per_), length_ - task_.first), rows = tokens * per_;
    for (long r = 0; r < rows; ++r) {
      const long row = query_row(task_.first * per_ + r);
      copy(a_->q + row * a_->dim, one_ + r * a_->dim, a_->scale);
      copy(a_->dout + row * a_->dim, two_ + r * a_->dim, 1.0f);
      lse_[r] = a_->lse[row];
      delta_of_[r] = delta_[row];
    }
    clear(rows);
    const long low = a_->window ? std::max(0L, task_.first + 1 - a_->window) : 0;
    for (long k = low; k < task_.first + tokens; k += chunk_) {
      const long n = std::min(chunk_, task_.first + tokens - k);
      for (long i = 0; i < n; ++i) {
        copy(key(k + i), columns_.one + i * width_, 1.0f);
        copy(value(k + i), columns_.two + i * width_, 1.0f);
      }
      block<false>(rows, n, [&](long r) {
        const long token = task_.first + r / per_;
        return std::pair((a_->window ? std::max(0L, token + 1 - a_->window) : 0L) - k,
                         token + 1 - k);
      });
    }
    for (long r = 0; r < rows; ++r)
      copy(sum_one_ + r * width_, a_->dq + query_row(task_.first * per_ + r) * a_->dim, a_->scale);
  }

  static long tokens_of_block(long per) { return std::max(1L, kRows / per); }

 private:
  const float* key(long i) const { return kv(a_->k, i); }
  const float* value(long i) const { return kv(a_->v, i); }
  const float* kv(const float* base, long i) const {
    return base + ((start_ + i) * a_->groups + task_.group) * a_->dim;
  }
  // The m-th (token, head) row of the group in this sequence, as a row of q.
  long query_row(long m) const {
    return (start_ + m / per_) * a_->heads + task_.group * per_ + m % per_;
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

  // Adds what `columns` columns give to the rows; range(r) are the columns that row r meets.
  template <bool kByKeys, class Range>
  void block(long rows, long columns, Range range) {
    turn(columns_.one, columns, columns_.turned_one);
    turn(columns_.two, columns, columns_.turned_two);
    for (long r = 0; r < rows; r += kBlock) {
      const long height = std::min<long>(kBlock, rows - r);
      long from = columns, upto = 0;
      for (long i = r; i < r + height; ++i) {
        const auto [lo, hi] = range(i);
        from = std::min(from, std::max(lo, 0L));
        upto = std::max(upto, std::min(hi, columns));
      }
      if (from >= upto) continue;
      const long first = from / 16, last = (upto + 15) / 16;
      float *p = p_ + r * kScoreStride, *ds = ds_ + r * kScoreStride;
      kScoreRows[height](one_ + r * a_->dim, columns_.turned_one, a_->dim, first, last, p);
      kScoreRows[height](two_ + r * a_->dim, columns_.turned_two, a_->dim, first, last, ds);
      for (long i = 0; i < height; ++i) {
        const auto [lo, hi] = range(r + i);
        probabilities<kByKeys>(r + i, first * 16, last * 16, std::max(lo, 0L), std::min(hi, columns));
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

  const KtAttentionGradArgs* a_;
  const float* delta_;
  const Task task_;
  const long per_, width_, chunk_, start_, length_;
  float *one_, *two_;          // [rows][dim]: what rows bring to the two products
  float *p_, *ds_;             // [rows][kScoreStride]
  float *sum_one_, *sum_two_;  // [rows][width]: dK and dV, or dQ
  float *lse_, *delta_of_;     // of the queries, rows or columns
  Columns columns_;
};

void run(const KtAttentionGradArgs* a) {
  thread_local std::vector<Task> by_keys, by_queries;
  thread_local Scratch scratch;
  const long per = a->heads / a->groups, rows = a->tokens * a->heads;
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
  by_keys.clear();
  by_queries.clear();
  for (long s = 0; s < a->seqs; ++s) {
    const long length = a->cu_seqlens[s + 1] - a->cu_seqlens[s];
    for (long g = 0; g < a->groups; ++g) {
      for (long t = 0; t < length; t += kRows) by_keys.push_back({s, g, t});
      for (long t = 0; t < length; t += Worker::tokens_of_block(per))
        by_queries.push_back({s, g, t});
    }
  }
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

extern "C" void kt_attention_grad(const KtAttentionGradArgs* a) { kt::run(a); }
