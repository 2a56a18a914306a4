// Attention of query rows to keys that a band mask names, and the merge of two partial results.
//
// The order of every reduction depends only on a row's own runs of keys:
//   - a run's keys come in chunks of 256, aligned to the run's first key;
//   - a score is a sum over the head dimension in order, of fma(scale * q, k);
//   - a chunk raises the row's maximum m where its own is larger, and what was summed so far is
//     rescaled (arXiv 2205.14135); then p = exp(score - m), the sum of p in 16 lanes (key % 16),
//     and the sum of p * v over keys in order.
// Keys outside the row's range are never touched, not even multiplied by zero.
//
// A tile is some tokens of one query range and one KV head, with up to kRows (token, query head)
// rows. Its chunks are those that the band leaves of each run; within one, rows are computed six at
// a time over the keys they have in common and one by one at the band's edge.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "band_attention.h"
#include "pool.h"

struct KtBandAttentionArgs {
  const float* q;  // [tokens, heads, dim]
  const float* k;  // [keys, groups, dim]
  const float* v;
  const kt::BandRun* runs;  // sorted by queries; equal query ranges follow each other
  float* out;               // [tokens, heads, dim]; rows in no run are left as they are
  float* lse;               // [tokens, heads]
  int64_t num_runs, heads, groups, dim;
  float scale;
};

struct KtBandMergeArgs {
  float* out;  // [rows, dim]
  float* lse;  // [rows]
  const float* more_out;
  const float* more_lse;
  int64_t rows, dim;
};

namespace kt {
namespace {

constexpr long kRows = 192;  // rows of a tile

struct Tile {
  const BandRun *runs, *end;  // the runs of one query range
  long token, num_tokens, group;
  long cost;
};

class Worker {
 public:
  Worker(const KtBandAttentionArgs* a, const Tile& tile)
      : a_(a), tile_(tile), per_(a->heads / a->groups), rows_(tile.num_tokens * per_),
        width_(round_up(a->dim, 16)) {
    thread_local Scratch scratch;
    const std::pair<float**, long> parts[] = {
        {&q_, round_up(rows_ * a->dim, 16)}, {&keys_, kSub * a->dim},
        {&scores_, rows_ * kScoreStride},    {&values_, kSub * round_up(width_, kPanel)},
        {&acc_, rows_ * width_},             {&top_, round_up(rows_, 16)},
        {&sum_, round_up(rows_, 16)}};
    long total = 0;
    for (const auto& part : parts) total += part.second;
    float* memory = scratch.get(total);
    for (const auto& [part, size] : parts) {
      *part = memory;
      memory += size;
    }
  }

  void work() {
    load_queries();
    std::fill_n(top_, rows_, -INFINITY);
    std::fill_n(sum_, rows_, 0.0f);
    std::fill_n(acc_, rows_ * width_, 0.0f);
    for (run_ = tile_.runs; run_ < tile_.end; ++run_) {
      const long begin = low(0), end = high(rows_ - 1);
      for (long start = begin / kChunk * kChunk; start < end; start += kChunk)
        chunk(start, std::max(begin - start, 0L), std::min(end - start, kChunk));
    }
    finish();
  }

 private:
  // The keys of the run that row m sees.
  long low(long m) const { return run_->key_begin(tile_.token + m / per_); }
  long high(long m) const { return run_->key_end(tile_.token + m / per_); }
  long row(long m) const {  // of q and the output
    return (tile_.runs->q0 + tile_.token + m / per_) * a_->heads + tile_.group * per_ + m % per_;
  }

  void load_queries() {  // times the scale
    for (long m = 0; m < rows_; ++m) {
      const float* x = a_->q + row(m) * a_->dim;
      for (long j = 0; j < a_->dim; ++j) q_[m * a_->dim + j] = x[j] * a_->scale;
    }
  }

  // Adds keys start + [begin, end) of the run to the rows that see them.
  void chunk(long start, long begin, long end) {
    const long stride = a_->groups * a_->dim, first = begin / kSub * kSub;
    const long base = (run_->k0 + start) * stride + tile_.group * a_->dim;
    for (long sub = first; sub < end; sub += kSub) {
      for (long i = 0; i < kSub && sub + i < end; i += 16) {
        long offset[16];  // whole vectors are read: lanes outside stand on the nearest key inside
        for (long lane = 0; lane < 16; ++lane)
          offset[lane] = base + std::clamp(sub + i + lane, begin, end - 1) * stride;
        turn_keys(a_->k, offset, a_->dim, keys_ + i / kPanel * kPanel * a_->dim + i % kPanel);
      }
      score(start, sub);
    }
    for (long m = 0; m < rows_; ++m) softmax(m, start);
    for (long sub = first; sub < end; sub += kSub) {
      const long from = std::max(sub, begin);
      gather_values(a_->v + base + from * stride, stride, from - sub,
                    std::min(kSub, end - sub));
      for (long i = 0; i < width_; i += kPanel)
        multiply(start, sub, int(std::min(kPanel, width_ - i) / 16), i);
    }
  }

  void score(long start, long sub) const {
    for (long m = 0; m < rows_; m += kBlock) {
      const long rows = std::min<long>(kBlock, rows_ - m), first = start + sub;
      const long from = std::max(low(m) - first, 0L) / 16;
      const long upto = (std::min(high(m + rows - 1) - first, kSub) + 15) / 16;
      if (from < upto)
        kScoreRows[rows](q_ + m * a_->dim, keys_, a_->dim, from, upto,
                         scores_ + m * kScoreStride + sub);
    }
  }

  // Keys [from, upto) of the sub, laid out [panel][key][kPanel].
  void gather_values(const float* values, long stride, long from, long upto) {
    for (long key = from; key < upto; ++key, values += stride)
      for (long i = 0; i < a_->dim; i += 16)
        store(values_ + (i / kPanel * kSub + key) * kPanel + i % kPanel,
              load_n(values + i, a_->dim - i));
  }

  // Scores of a row to p in their place.
  void softmax(long m, long start) {
    const long begin = std::max(low(m) - start, 0L), end = std::min(high(m) - start, kChunk);
    if (begin >= end) return;
    static constexpr float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 lane = load(lanes), never = set1(-INFINITY);
    float* s = scores_ + m * kScoreStride;
    const long first = begin / 16 * 16, last = (end - 1) / 16 * 16;
    store(s + first, select_lt(lane, set1(float(begin - first)), never, load(s + first)));
    store(s + last, select_lt(lane, set1(float(end - last)), load(s + last), never));
    f32x16 top[2] = {load(s + first), load(s + last)};
    for (long i = first; i + 16 <= last; i += 32)
      for (int j = 0; j < 2; ++j) top[j] = max(top[j], load(s + i + 16 * j));
    raise(m, reduce_max(max(top[0], top[1])));
    const f32x16 shift = set1(top_[m]);
    f32x16 sum = zero();
    for (long i = first; i <= last; i += 16) {
      f32x16 p = exp_down(load(s + i) - shift);
      sum = sum + p;
      store(s + i, p);
    }
    sum_[m] += reduce_add(sum);
  }

  void raise(long m, float top) {
    if (!(top > top_[m])) return;
    if (sum_[m] != 0.0f) {
      float keep[16];
      const f32x16 factor = exp_down(set1(top_[m] - top));
      store(keep, factor);
      sum_[m] *= keep[0];
      float* acc = acc_ + m * width_;
      for (long i = 0; i < width_; i += 16) store(acc + i, load(acc + i) * factor);
    }
    top_[m] = top;
  }

  // acc[m][column, + 16 vectors) += p[m] * values over kSub keys from `sub`, every row over its
  // own range: where the rows of a block differ, those keys are done row by row.
  void multiply(long start, long sub, int vectors, long column) const {
    const long first = start + sub;
    const Gathered value{values_ + column * kSub};
    for (long m = 0; m < rows_; m += kBlock) {
      const long rows = std::min<long>(kBlock, rows_ - m);
      const long begin = std::max(low(m + rows - 1) - first, 0L);
      const long end = std::min(high(m) - first, kSub);
      const float* p = scores_ + m * kScoreStride + sub;
      float* out = acc_ + m * width_ + column;
      const auto single = [&](long r, long from, long upto) {
        from = std::max(from, low(m + r) - first);
        upto = std::min(upto, high(m + r) - first);
        if (from < upto)
          value_rows(1, vectors, p + r * kScoreStride, from, upto, value, out + r * width_, width_);
      };
      if (begin >= end) {
        for (long r = 0; r < rows; ++r) single(r, 0, kSub);
        continue;
      }
      if (begin > 0)
        for (long r = 0; r < rows; ++r) single(r, 0, begin);
      value_rows(int(rows), vectors, p, begin, end, value, out, width_);
      if (end < kSub)
        for (long r = 0; r < rows; ++r) single(r, end, kSub);
    }
  }

  void finish() const {
    for (long m = 0; m < rows_; ++m) {
      const long to = row(m);
      const bool seen = sum_[m] != 0.0f;  // the largest p of a row that sees a key is 1
      const f32x16 sum = set1(seen ? sum_[m] : 1.0f);
      for (long i = 0; i < a_->dim; i += 16)
        store_n(a_->out + to * a_->dim + i, a_->dim - i, load(acc_ + m * width_ + i) / sum);
      a_->lse[to] = seen ? float(double(top_[m]) + std::log(double(sum_[m]))) : -INFINITY;
    }
  }

  const KtBandAttentionArgs* a_;
  const Tile& tile_;
  const long per_, rows_;  // query heads per KV head; rows of the tile
  const long width_;       // dim, rounded up to whole vectors
  const BandRun* run_ = nullptr;
  float *q_, *keys_, *scores_, *values_;
  float *acc_, *top_, *sum_;  // of each row: sum of p * v, maximum, sum of p
};

void run(const KtBandAttentionArgs* a) {
  thread_local std::vector<Tile> tiles;
  const long per = a->heads / a->groups, step = std::max(1L, kRows / per);
  tiles.clear();
  const BandRun* const end = a->runs + a->num_runs;
  for (const BandRun *runs = a->runs, *next; runs < end; runs = next) {
    next = end_of_range(runs, end);
    for (long t = 0; t < runs->queries(); t += step) {
      const long count = std::min(step, runs->queries() - t);
      long keys = 0;
      for (const BandRun* one = runs; one < next; ++one)
        keys += std::max(0L, one->key_end(t + count - 1) - one->key_begin(t));
      for (long g = 0; g < a->groups; ++g)
        tiles.push_back({runs, next, t, count, g, count * keys});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& x, const Tile& y) { return x.cost > y.cost; });
  const Tile* tile_of = tiles.data();
  parallel_for(long(tiles.size()), [=](long i, int) { Worker(a, tile_of[i]).work(); });
}

void merge_row(const KtBandMergeArgs* a, long row) {
  const float one = a->lse[row], two = a->more_lse[row], top = one > two ? one : two;
  if (top == -INFINITY) return;
  float t[16] = {one - top, two - top};
  store(t, exp(load(t)));
  const float sum = t[0] + t[1];
  const f32x16 keep = set1(t[0] / sum), add = set1(t[1] / sum);
  float* out = a->out + row * a->dim;
  const float* more = a->more_out + row * a->dim;
  for (long i = 0; i < a->dim; i += 16)
    store_n(out + i, a->dim - i,
            fma(load_n(more + i, a->dim - i), add, load_n(out + i, a->dim - i) * keep));
  a->lse[row] = float(double(top) + std::log(double(sum)));
}

}  // namespace
}  // namespace kt

extern "C" void kt_band_attention(const KtBandAttentionArgs* a) { kt::run(a); }

extern "C" void kt_band_merge(const KtBandMergeArgs* a) {
  kt::parallel_for((a->rows + 255) / 256, [=](long i, int) {
    for (long row = i * 256; row < std::min<long>(a->rows, (i + 1) * 256); ++row)
      kt::merge_row(a, row);
  });
}
