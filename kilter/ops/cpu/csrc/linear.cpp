// y = x W^T (+ bias) (+ residual), or activation(gate) * up over the two halves of W.
//
// The law: y[t][n] is one chain of fma over k = 0..K-1 from zero (with `splits` V: one chain per
// equal part of K, the parts added in a balanced tree), then + bias, then residual +. Rows, tiles,
// threads and storage decide only who computes it and when.
//
// Work is cut along the outputs into panels and, for many rows, along the rows. A thread takes a
// run of panels, then for each block of four panels:
//
//   few rows    one pass over k straight from the packed weights, all sums in registers
//   many rows   for each stretch of k: weights as fp32 in L1 (widened to scratch unless they are
//               fp32 already), then every tile of up to six rows over them
//
// The sums land in a scratch [rows][64]; the epilogue turns them into outputs.
#include <atomic>
#include <memory>

#include "activation.h"
#include "linear_tile.h"
#include "pool.h"

namespace kt {

struct KtLinearArgs {
  const float* x;         // [rows][ldx], k used
  const float* bias;      // [n] or null
  const float* residual;  // [rows][ld_residual] or null
  float* y;               // [rows][n], gated: [rows][n / 2]
  int64_t rows, ldx, ld_residual;
  KtMatrix w;
  int32_t splits, activation;  // activation -1: not gated
};

namespace {

constexpr int kBlock = 4;          // panels in a block
constexpr int kWidth = kBlock * 16;
constexpr long kRowBlock = 192;    // most rows of a block: its sums stay in L2
#if KT_AVX512
constexpr long kDepth = 128;       // stretch of k: four panels of it are 32 KB
#else
constexpr long kDepth = 256;       // one panel of it is 16 KB
#endif

// Thread-local memory that only grows.
float* sums_scratch(long floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local long size = 0;
  if (size < floats) {
    memory.reset(static_cast<float*>(std::aligned_alloc(64, size_t(floats) * 4)));
    size = floats;
  }
  return memory.get();
}

class Linear {
 public:
  explicit Linear(const KtLinearArgs& args)
      : a(args), w(args.w), gated(args.activation >= 0),
        units(gated ? w.half_panels : w.panels), unit_panels(gated ? 2 : 1),
        row_blocks((a.rows + kRowBlock - 1) / kRowBlock) {
    const int most = w.plain() ? 0 : w.grouped() ? 3 : kTileRows;
    const bool aligned = !w.grouped() || a.splits == 1 || w.k / a.splits % w.group == 0;
    direct = a.rows <= most && aligned;
  }

  void run() const {
    const long total = units * row_blocks;
    if (!total) return;
    if (small()) return run_units(0, total);
    const int threads = num_threads();
    std::atomic<long> next{0};
    parallel_for(threads, [&](long, int) {
      // Runs of panels, shorter towards the end so that the threads finish together.
      for (long first = next.load(std::memory_order_relaxed); first < total;) {
        const long share = (total - first) / (2 * threads) * unit_panels;
        const long panels = share >= kBlock ? share / kBlock * kBlock : 2;
        const long count = std::min(total - first, panels / unit_panels);
        if (!next.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) continue;
        run_units(first, count);
        first = next.load(std::memory_order_relaxed);
      }
    });
  }

 private:
  // Too little to be worth waking anybody for: a few microseconds on one core.
  bool small() const {
    const double bytes = double(w.panels) * 16 * w.k, flops = 2.0 * bytes * a.rows;
    return bytes < 32e3 && flops < 4e5;
  }

  void run_units(long first, long count) const {
    while (count > 0) {
      const long block = first / units, unit = first % units;
      const long n = std::min({count, units - unit, long(kBlock / unit_panels)});
      const long row0 = block * a.rows / row_blocks, row1 = (block + 1) * a.rows / row_blocks;
      run_block(unit, n, row0, row1 - row0);
      first += n;
      count -= n;
    }
  }

  // Units unit .. unit + n - 1 (a panel, or a gate panel and its up panel) for `rows` rows.
  void run_block(long unit, long n, long row0, long rows) const {
    long ids[kBlock];
    const int count = int(n) * unit_panels;
    for (int b = 0; b < kBlock; ++b) {
      const int i = std::min(b, count - 1);  // past the end: any panel, its sums are not used
      ids[b] = gated ? unit + i / 2 + i % 2 * w.half_panels : unit + i;
    }
    float* sums = sums_scratch(a.splits * rows * kWidth);
    for (long s = 0; s < a.splits; ++s) {
      const long k0 = s * (w.k / a.splits), k1 = k0 + w.k / a.splits;
      float* c = sums + s * rows * kWidth;
      if (direct)
        sum_few(ids, count, row0, rows, k0, k1, c);
      else
        sum_many(ids, count, row0, rows, k0, k1, c);
    }
    for (long r = 0; r < rows; ++r) {
      float* c = sums + r * kWidth;
      if (a.splits > 1)
        for (int b = 0; b < count; ++b) store(c + b * 16, tree(c + b * 16, rows, 0, a.splits));
      finish_row(ids, count, row0 + r, c);
    }
  }

  void sum_few(const long* ids, int count, long row0, long rows, long k0, long k1,
               float* c) const {
    const int step = tile_panels(int(rows));
    const TileFn fn = direct_tile(w.storage, int(rows));
    for (int b = 0; b < count; b += step) {
      const uint8_t* panels[kBlock];
      for (int p = 0; p < step; ++p) panels[p] = w.panel(ids[b + p]);
      fn(w, panels, a.x + row0 * a.ldx, a.ldx, k0, k1, c + b * 16, kWidth, false);
    }
  }

  void sum_many(const long* ids, int count, long row0, long rows, long k0, long k1,
                float* c) const {
    alignas(64) thread_local float wide[kWidePanels][kDepth * 16];
    const long tiles = (rows + kTileRows - 1) / kTileRows;
    for (int b = 0; b < count; b += kWidePanels) {
      const int used = std::min(kWidePanels, count - b);
      for (long k = k0; k == k0 || k < k1; k += kDepth) {
        const long depth = std::min(kDepth, k1 - k);
        const uint8_t* panels[kWidePanels];
        for (int p = 0; p < kWidePanels; ++p) {
          panels[p] = w.storage == kFp32 ? w.panel(ids[b + p]) + k * 64 : (uint8_t*)wide[p];
          if (w.storage != kFp32 && p < used) widen(w, ids[b + p], k, k + depth, wide[p]);
        }
        for (long t = 0; t < tiles; ++t) {
          const long r0 = t * rows / tiles, r1 = (t + 1) * rows / tiles;
          wide_tile(int(r1 - r0), used)(w, panels, a.x + (row0 + r0) * a.ldx + k, a.ldx, 0, depth,
                                        c + r0 * kWidth + b * 16, kWidth, k != k0);
        }
      }
    }
  }

  // The parts lo .. hi - 1 of one vector of sums; the left half takes the odd one.
  f32x16 tree(const float* c, long rows, long lo, long hi) const {
    if (hi - lo == 1) return load(c + lo * rows * kWidth);
    const long mid = lo + (hi - lo + 1) / 2;
    return tree(c, rows, lo, mid) + tree(c, rows, mid, hi);
  }

  f32x16 with_bias(f32x16 v, long panel) const {
    return a.bias ? v + load_n(a.bias + w.row(panel), w.lanes(panel)) : v;
  }

  void finish_row(const long* ids, int count, long row, const float* c) const {
    if (gated) {
      float* y = a.y + row * w.half_rows;
      for (int b = 0; b < count; b += 2, c += 32) {
        const f32x16 gate = with_bias(load(c), ids[b]), up = with_bias(load(c + 16), ids[b + 1]);
        store_n(y + w.row(ids[b]), w.lanes(ids[b]), activate(gate, a.activation) * up);
      }
      return;
    }
    for (int b = 0; b < count; ++b, c += 16) {
      const long column = w.row(ids[b]), lanes = w.lanes(ids[b]);
      f32x16 v = with_bias(load(c), ids[b]);
      if (a.residual) v = load_n(a.residual + row * a.ld_residual + column, lanes) + v;
      store_n(a.y + row * w.n + column, lanes, v);
    }
  }

  const KtLinearArgs& a;
  const Layout w;
  const bool gated;
  const long units;
  const int unit_panels;
  const long row_blocks;
  bool direct;
};

}  // namespace
}  // namespace kt

extern "C" void kt_linear(const kt::KtLinearArgs* a) { kt::Linear(*a).run(); }
