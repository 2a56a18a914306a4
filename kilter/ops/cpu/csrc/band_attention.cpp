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
    scratch.get({{&q_, rows_ * a->dim}, {&keys_, kSub * a->dim},
                 {&scores_, rows_ * kScoreStride}, {&values_, kSub * round_up(width_, kPanel)},
                 {&acc_, rows_ * width_}, {&top_, rows_}, {&sum_, rows_}});
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
  auto low_of(long first) const {  // counted from key `first`
    return [=, this](long m) { return low(m) - first; };
  }
  auto high_of(long first) const {
    return [=, this](long m) { return high(m) - first; };
  }
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
      score_seen(rows_, q_, keys_, a_->dim, low_of(start + sub), high_of(start + sub),
                 scores_ + sub);
    }
    for (long m = 0; m < rows_; ++m) softmax(m, start);
    for (long sub = first; sub < end; sub += kSub) {
      for (long key = std::max(sub, begin); key < std::min(sub + kSub, end); ++key)
        lay_values(a_->v + base + key * stride, a_->dim, values_ + (key - sub) * kPanel);
      for (long i = 0; i < width_; i += kPanel)
        add_values(rows_, int(std::min(kPanel, width_ - i) / 16), scores_ + sub,
                   low_of(start + sub), high_of(start + sub), Laid{values_ + i * kSub}, acc_ + i,
                   width_);
    }
  }

  // Scores of a row to p in their place.
  void softmax(long m, long start) {
    const long begin = std::max(low(m) - start, 0L), end = std::min(high(m) - start, kChunk);
    if (begin >= end) return;
    float* scores = scores_ + m * kScoreStride;
    raise(m, top_score(scores, begin, end));
    sum_[m] += probabilities(scores, begin, end, top_[m]);
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
