// Causal attention over a sequence's own keys or a paged cache.
//
// The order of every reduction depends only on a row's own context index and window:
//   - keys come in chunks of 256, aligned to key 0;
//   - a score is a sum over the head dimension in order, of fma(scale * q, k);
//   - within a chunk: the maximum m, p = exp(score - m), the sum of p in 16 lanes (key % 16), and
//     the sum of p * v over keys in order;
//   - chunks are merged in order by the usual rescaling to the larger maximum.
// Keys outside the row's range are never touched, not even multiplied by zero.
//
// So the work can be cut freely. A tile is some tokens of one sequence and some KV heads, with up
// to kRows (token, query head) rows for each KV head. Keys are turned to [dim][keys] once per KV
// head and 64 keys, so a decode step (whose rows are the query heads that share a KV head) and a
// prefill run the same two small matrix products. A decode tile takes all KV heads, to read whole
// slots of the cache in the order they lie in. A tile whose keys are many compared with the whole
// call is cut into runs of chunks that different threads take; their partial results are merged in
// chunk order.
#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "attention_tile.h"
#include "pool.h"

struct KtAttentionArgs {
  const float* q;  // [tokens, heads, dim]
  const void* k;   // [slots, groups, dim]
  const void* v;
  const int32_t* cu_seqlens;  // [seqs + 1]
  const int32_t* context;     // null, or [seqs]
  const int32_t* page_table;  // null (key j of a sequence is row cu_seqlens[s] + j), or [seqs, width]
  float* out;                 // [tokens, heads, dim]
  float* lse;                 // null, or [tokens, heads]
  int32_t* status;            // 1 bad cu_seqlens, 2 context too short, 3 table too narrow, 4 bad page
  int64_t tokens, seqs, heads, groups, dim, slots, page_size, table_width;
  int64_t window;  // 0: none
  float scale;
  int32_t kv_type;  // 0 fp32, 1 bf16, 2 fp16
};

namespace kt {
namespace {

constexpr long kRows = 192;               // rows of a tile
constexpr long kTogether = 16;           // rows per KV head up to which a tile takes all KV heads

struct Tile {
  long seq, token, num_tokens, group, num_groups;
  long position;       // context index of the first token
  long first, last;    // chunks [first, last)
  long cost;
  long partial = -1;   // where its chunks' partial results lie, if it is cut
};

struct Segment {
  long tile, first, last;
};

// (maximum, sum, accumulator) of one chunk or of several merged ones, for a tile's rows. A row
// that no key has reached has sum 0.
struct Partial {
  float *top, *sum, *acc;
  static long floats(long rows, long width) { return round_up(2 * rows, 16) + rows * width; }
  static Partial at(float* p, long rows) { return {p, p + rows, p + round_up(2 * rows, 16)}; }
};

void merge_row(const Partial& into, const Partial& from, long row, long width) {
  if (from.sum[row] == 0.0f) return;
  float *a = into.acc + row * width, *b = from.acc + row * width;
  if (into.sum[row] == 0.0f) {
    into.top[row] = from.top[row];
    into.sum[row] = from.sum[row];
    std::memcpy(a, b, size_t(width) * sizeof(float));
    return;
  }
  const float top = std::max(into.top[row], from.top[row]);
  float t[16] = {into.top[row] - top, from.top[row] - top};
  store(t, exp(load(t)));
  const f32x16 keep = set1(t[0]), add = set1(t[1]);
  for (long i = 0; i < width; i += 16) store(a + i, fma(load(b + i), add, load(a + i) * keep));
  into.top[row] = top;
  into.sum[row] = std::fma(from.sum[row], t[1], into.sum[row] * t[0]);
}

template <class T>
class Worker {
 public:
  Worker(const KtAttentionArgs* a, const Tile& tile)
      : a_(a), tile_(tile), per_(a->heads / a->groups), rows_(tile.num_tokens * per_),
        all_rows_(rows_ * tile.num_groups), width_(round_up(a->dim, 16)) {
    thread_local Scratch scratch;
    float *chunk, *whole;
    const long partial = Partial::floats(all_rows_, width_);
    scratch.get({{&q_, all_rows_ * a->dim}, {&keys_, kSub * a->dim},
                 {&scores_, all_rows_ * kScoreStride},
                 {&values_, kSub * round_up(width_, kPanel)}, {&chunk, partial},
                 {&whole, partial}});
    chunk_ = Partial::at(chunk, all_rows_);
    whole_ = Partial::at(whole, all_rows_);
  }

  void whole() {
    load_queries();
    std::fill_n(whole_.sum, all_rows_, 0.0f);
    for (long c = tile_.first; c < tile_.last; ++c) {
      chunk(c, chunk_);
      for (long m = 0; m < all_rows_; ++m) merge_row(whole_, chunk_, m, width_);
    }
    finish();
  }

  void some(long first, long last, float* partials) {
    load_queries();
    for (long c = first; c < last; ++c) chunk(c, part(c, partials));
  }

  void merge(float* partials) {
    std::fill_n(whole_.sum, all_rows_, 0.0f);
    for (long c = tile_.first; c < tile_.last; ++c)
      for (long m = 0; m < all_rows_; ++m) merge_row(whole_, part(c, partials), m, width_);
    finish();
  }

 private:
  Partial part(long c, float* partials) const {
    return Partial::at(partials + (c - tile_.first) * Partial::floats(all_rows_, width_),
                       all_rows_);
  }

  long high(long token) const { return tile_.position + token + 1; }
  long low(long token) const {
    return a_->window ? std::max(0L, high(token) - a_->window) : 0L;
  }
  // Of a KV head's row, counted from key `first`.
  auto low_of(long first) const {
    return [=, this](long m) { return low(m / per_) - first; };
  }
  auto high_of(long first) const {
    return [=, this](long m) { return high(m / per_) - first; };
  }
  long row(long group, long m) const {  // of the output
    return (tile_.token + m / per_) * a_->heads + (tile_.group + group) * per_ + m % per_;
  }

  void load_queries() {  // times the scale
    float* to = q_;
    for (long g = 0; g < tile_.num_groups; ++g)
      for (long m = 0; m < rows_; ++m, to += a_->dim) {
        const float* x = a_->q + row(g, m) * a_->dim;
        for (long j = 0; j < a_->dim; ++j) to[j] = x[j] * a_->scale;
      }
  }

  // One chunk's partial result of every row. While some keys are worked on, the rows that come
  // kSub keys later are fetched: the next keys, then the first values, then the next chunk.
  void chunk(long c, const Partial& to) {
    const long start = c * kChunk;
    const long begin = std::max(low(0) - start, 0L);
    const long all = high(tile_.num_tokens - 1) - start, end = std::min(all, kChunk);
    const bool direct = rows_ <= 2 * kBlock && a_->dim % 16 == 0;
    const T *k = static_cast<const T*>(a_->k) + tile_.group * a_->dim;
    const T *v = static_cast<const T*>(a_->v) + tile_.group * a_->dim;
    if (!find(start, begin, all)) {
      std::fill_n(to.sum, all_rows_, NAN);
      return;
    }
    const long first = begin / kSub * kSub;
    for (long sub = first; sub < end; sub += kSub)
      for (long g = 0; g < tile_.num_groups; ++g) {
        const T* keys = k + g * a_->dim;
        const T* ahead = sub + kSub < end ? keys : v + g * a_->dim;
        const long* ahead_at = offset_ + (sub + kSub < end ? sub + kSub : first);
        for (long i = 0; i < kSub && sub + i < end; i += 16) {
          fetch(ahead, ahead_at + i, 16);
          turn_keys(keys, offset_ + sub + i, a_->dim,
                    keys_ + i / kPanel * kPanel * a_->dim + i % kPanel);
        }
        score_seen(rows_, q_ + g * rows_ * a_->dim, keys_, a_->dim, low_of(start + sub),
                   high_of(start + sub), scores_ + g * rows_ * kScoreStride + sub);
      }
    for (long m = 0; m < all_rows_; ++m) softmax(m, start, to);
    std::fill_n(to.acc, all_rows_ * width_, 0.0f);
    for (long sub = first; sub < end; sub += kSub)
      for (long g = 0; g < tile_.num_groups; ++g) {
        const T* values = v + g * a_->dim;
        const T* ahead = sub + kSub < end ? values : k + g * a_->dim;
        const long* at = offset_ + sub;
        if (!direct) {
          fetch(ahead, at + kSub, kSub);
          for (long key = 0; key < std::min(kSub, end - sub); ++key)
            lay_values(values + at[key], a_->dim, values_ + key * kPanel);
        }
        for (long i = 0; i < width_; i += kPanel) {
          const auto add = [&](auto value) {
            add_values(rows_, int(std::min(kPanel, width_ - i) / 16),
                       scores_ + g * rows_ * kScoreStride + sub, low_of(start + sub),
                       high_of(start + sub), value, to.acc + g * rows_ * width_ + i, width_);
          };
          if (direct)
            add([=](long key) {
              for (long j = i; j < i + kPanel; j += 64 / sizeof(T))
                __builtin_prefetch(ahead + at[kSub + key] + j);
              return values + at[key] + i;
            });
          else
            add(Laid{values_ + i * kSub});
        }
      }
  }

  void fetch(const T* base, const long* offset, long n) const {
    for (long i = 0; i < n; ++i)
      for (long j = 0; j < a_->dim; j += 64 / sizeof(T)) __builtin_prefetch(base + offset[i] + j);
  }

  // Where the keys of a chunk and the first of the next begin in the cache, in elements. Keys
  // outside [begin, all) stand on the nearest inside: whole vectors are read, and their lanes are
  // masked. False if a page lies outside the cache.
  bool find(long start, long begin, long all) {
    const long stride = a_->groups * a_->dim, end = std::min(all, kChunk + kSub);
    if (!a_->page_table) {
      for (long i = begin; i < end; ++i)
        offset_[i] = (a_->cu_seqlens[tile_.seq] + start + i) * stride;
    } else {
      const long size = a_->page_size;
      const int32_t* page = a_->page_table + tile_.seq * a_->table_width + (start + begin) / size;
      for (long i = begin, in_page = (start + begin) % size; i < end; in_page = 0, ++page) {
        if (*page < 0 || (*page + 1L) * size > a_->slots) {
          std::atomic_ref<int32_t>(*a_->status).store(4, std::memory_order_relaxed);
          return false;
        }
        for (; in_page < size && i < end; ++in_page, ++i)
          offset_[i] = (*page * size + in_page) * stride;
      }
    }
    std::fill(offset_, offset_ + begin, offset_[begin]);
    std::fill(offset_ + end, offset_ + kChunk + kSub, offset_[end - 1]);
    return true;
  }

  void softmax(long m, long start, const Partial& to) {
    const long token = m % rows_ / per_;
    const long begin = std::max(low(token) - start, 0L);
    const long end = std::min(high(token) - start, kChunk);
    if (begin >= end) {
      to.sum[m] = 0.0f;
      return;
    }
    float* scores = scores_ + m * kScoreStride;
    to.top[m] = top_score(scores, begin, end);
    to.sum[m] = probabilities(scores, begin, end, to.top[m]);
  }

  void finish() const {
    for (long g = 0; g < tile_.num_groups; ++g)
      for (long m = 0; m < rows_; ++m) {
        const long from = g * rows_ + m, to = row(g, m);
        const f32x16 sum = set1(whole_.sum[from]);
        for (long i = 0; i < a_->dim; i += 16)
          store_n(a_->out + to * a_->dim + i, a_->dim - i,
                  load(whole_.acc + from * width_ + i) / sum);
        if (a_->lse)
          a_->lse[to] = float(double(whole_.top[from]) + std::log(double(whole_.sum[from])));
      }
  }

  const KtAttentionArgs* a_;
  const Tile& tile_;
  const long per_, rows_, all_rows_;  // query heads per KV head; rows per KV head; rows in all
  const long width_;                  // dim, rounded up to whole vectors
  float *q_, *keys_, *scores_, *values_;
  Partial chunk_, whole_;
  long offset_[kChunk + kSub];
};

// The tiles of the call, or the status of a batch that makes no sense.
int32_t plan(const KtAttentionArgs* a, std::vector<Tile>& tiles) {
  const int32_t* cu = a->cu_seqlens;
  if (cu[0] != 0 || cu[a->seqs] != a->tokens) return 1;
  const long per = a->heads / a->groups, step = std::max(1L, kRows / per);
  long chunks = 0;
  for (long s = 0; s < a->seqs; ++s) {
    const long n = cu[s + 1] - cu[s];
    if (n < 0 || cu[s + 1] > a->tokens) return 1;
    const long context = a->context ? a->context[s] : n;
    if (context < n) return 2;
    if (n && a->page_table && (context - 1) / a->page_size >= a->table_width) return 3;
    chunks += n ? (context - 1) / kChunk + 1 : 0;
  }
  tiles.clear();
  for (long s = 0; s < a->seqs; ++s) {
    const long n = cu[s + 1] - cu[s], context = a->context ? a->context[s] : n;
    const bool together = n * per <= kTogether && chunks >= 2 * num_threads();
    const long groups = together ? a->groups : 1;
    for (long t = 0; t < n; t += step) {
      const long count = std::min(step, n - t), position = context - n + t;
      const long low = a->window ? std::max(0L, position + 1 - a->window) : 0L;
      const long first = low / kChunk, last = (position + count - 1) / kChunk + 1;
      for (long g = 0; g < a->groups; g += groups)
        tiles.push_back({s, cu[s] + t, count, g, groups, position, first, last,
                         count * per * groups * (last - first)});
    }
  }
  return 0;
}

template <class T>
void run(const KtAttentionArgs* a) {
  thread_local std::vector<Tile> tiles;
  thread_local std::vector<Segment> segments;
  thread_local std::vector<long> cut;
  thread_local Scratch partials;
  if (const int32_t status = plan(a, tiles)) {
    *a->status = status;
    std::fill_n(a->out, a->tokens * a->heads * a->dim, NAN);
    return;
  }
  long total = 0;
  for (const Tile& tile : tiles) total += tile.cost;
  const long share = num_threads() > 1 ? std::max(1L, total / (4 * num_threads())) : total + 1;
  const long width = round_up(a->dim, 16), per = a->heads / a->groups;
  segments.clear();
  cut.clear();
  long floats = 0;
  // Back to front: the longest contexts of a prefill are started first.
  for (long i = long(tiles.size()) - 1; i >= 0; --i) {
    Tile& tile = tiles[i];
    const long chunks = tile.last - tile.first;
    const long parts = std::min(chunks, (tile.cost + share / 2) / share);
    if (parts <= 1) {
      segments.push_back({i, tile.first, tile.last});
      continue;
    }
    cut.push_back(i);
    tile.partial = floats;
    floats += chunks * Partial::floats(tile.num_tokens * per * tile.num_groups, width);
    for (long p = 0; p < parts; ++p)
      segments.push_back({i, tile.first + chunks * p / parts, tile.first + chunks * (p + 1) / parts});
  }
  float* parts = floats ? partials.get(floats) : nullptr;
  const Tile* tile_of = tiles.data();
  const Segment* segment_of = segments.data();
  parallel_for(long(segments.size()), [=](long i, int) {
    const Segment& segment = segment_of[i];
    const Tile& tile = tile_of[segment.tile];
    Worker<T> worker(a, tile);
    if (tile.partial < 0)
      worker.whole();
    else
      worker.some(segment.first, segment.last, parts + tile.partial);
  });
  const long* cut_of = cut.data();
  parallel_for(long(cut.size()), [=](long i, int) {
    const Tile& tile = tile_of[cut_of[i]];
    Worker<T>(a, tile).merge(parts + tile.partial);
  });
}

}  // namespace
}  // namespace kt

extern "C" void kt_attention(const KtAttentionArgs* a) {
  switch (a->kv_type) {
    case 0: return kt::run<float>(a);
    case 1: return kt::run<kt::bf16>(a);
    default: return kt::run<kt::f16>(a);
  }
}
