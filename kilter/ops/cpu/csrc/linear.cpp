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
// Where there are several blocks of rows, weights that are not fp32 panels are widened once for all
// of them, a segment of a few megabytes at a time.
//
// The sums land in a scratch [rows][64]; the epilogue turns them into outputs.
#include <atomic>

#include "activation.h"
#include "linear_tile.h"
#include "pool.h"
#include "scratch.h"

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
constexpr long kRowBlock = 96;     // most rows of a block: they and their sums stay in L2
constexpr long kSegment = 1 << 20;  // fp32 weights widened for all rows: they stay in L3
#if KT_AVX512
constexpr long kDepth = 128;       // stretch of k: four panels of it are 32 KB
#else
constexpr long kDepth = 320;       // one panel of it is 20 KB
#endif

// Whether it is best to read the weights as they lie: one tile of rows, or two, of equally many
// panels, where registers are plenty and widening is cheap enough to be done twice.
constexpr bool read_directly(int storage, long rows) {
  if (rows <= kTileRows) return true;
  return (storage == kBf16 || storage == kFp16) && kTileRows > kWideRows && rows <= 2 * kTileRows &&
         tile_panels(int(rows / 2)) == tile_panels(int(rows + 1) / 2);
}

class Linear {
 public:
  explicit Linear(const KtLinearArgs& args)
      : a(args), w(args.w), gated(args.activation >= 0),
        units(gated ? w.half_panels : w.panels), unit_panels(gated ? 2 : 1),
        row_blocks((a.rows + kRowBlock - 1) / kRowBlock),
        block_rows(round_up((a.rows + row_blocks - 1) / std::max(row_blocks, 1L), kTileRows)) {
    const bool aligned = !w.grouped() || a.splits == 1 || w.k / a.splits % w.group == 0;
    direct = !w.plain() && aligned && read_directly(w.storage, a.rows);
  }

  void run() {
    if (!units || !a.rows) return;
    if (w.storage == kFp32 || row_blocks == 1 || !w.k) return run_units(units);
    thread_local Scratch scratch;
    const long unit_floats = unit_panels * w.k * 16;
    const long most = std::clamp(kSegment / unit_floats, long(kBlock), units);
    float* memory = scratch.get(most * unit_floats);
    for (long count; first_unit < units; first_unit += count) {
      count = std::min(most, units - first_unit);
      parallel_for(count * unit_panels, [&](long i, int) {
        const long panel = first_unit + i / unit_panels + i % unit_panels * w.half_panels;
        widen(w, panel, 0, w.k, memory + i * w.k * 16);
      });
      widened = memory;
      run_units(count);
    }
  }

 private:
  // `count` units from first_unit, for all rows.
  void run_units(long count) const {
    const long total = count * row_blocks;
    const int threads = small() ? 1 : num_threads();
    std::atomic<long> next{0};
    // The block that starts at the next free unit: four panels, two when the end is near, so that
    // the threads finish together.
    auto claim = [&](Block& block) {
      long first = next.load(std::memory_order_relaxed), n;
      do {
        if (first >= total) return false;
        const int panels = (total - first) * unit_panels > 4 * threads ? kBlock : kBlock / 2;
        n = std::min(count - first % count, long(panels / unit_panels));
      } while (!next.compare_exchange_weak(first, first + n, std::memory_order_relaxed));
      block = make_block(first_unit + first % count, n, first / count);
      return true;
    };
    parallel_for(threads, [&](long, int) {
      Block block, following;
      for (bool more = claim(block); more; block = following) {
        more = claim(following);  // one block early: its weights are fetched meanwhile
        run_block(block, more ? &following : nullptr);
      }
    });
  }

  // A panel of fp32 weights if there is one, else null.
  const float* fp32_panel(long panel) const {
    if (w.storage == kFp32) return (const float*)w.panel(panel);
    if (!widened) return nullptr;
    const long unit = gated ? panel % w.half_panels : panel, half = gated ? panel / w.half_panels : 0;
    return widened + ((unit - first_unit) * unit_panels + half) * w.k * 16;
  }

  // The panels of a block, the matrix rows their lanes are, and the rows of x.
  struct Block {
    int count;
    long panel[kBlock], row[kBlock], lanes[kBlock];
    long row0, rows;
  };

  Block make_block(long unit, long n, long part) const {
    Block block;
    block.count = int(n) * unit_panels;
    for (int b = 0; b < kBlock; ++b) {
      const int i = std::min(b, block.count - 1);  // past the end: any panel, its sums are unused
      const long panel = gated ? unit + i / 2 + i % 2 * w.half_panels : unit + i;
      block.panel[b] = panel;
      block.row[b] = w.row(panel);
      block.lanes[b] = w.lanes(panel);
    }
    block.row0 = part * block_rows;
    block.rows = std::min(block_rows, a.rows - block.row0);
    return block;
  }

  // Too little to be worth waking anybody for: a few microseconds on one core.
  bool small() const {
    const double bytes = double(w.panels) * 16 * w.k, flops = 2.0 * bytes * a.rows;
    return bytes < 32e3 && flops < 4e5;
  }

  // All sums of a block, the parts apart; rows are finished as their last sums come out.
  void run_block(const Block& block, const Block* following) const {
    thread_local Scratch scratch;
    float* sums = scratch.get(a.splits * block.rows * kWidth);
    if (direct) return sum_few(block, following, sums);
    for (long part = 0; part < a.splits; ++part) sum_many(block, following, part, sums);
  }

  void sum_few(const Block& block, const Block* following, float* sums) const {
    const long tiles = (block.rows + kTileRows - 1) / kTileRows;
    const int step = tile_panels(int((block.rows + tiles - 1) / tiles));
    const long depth = w.k / a.splits;
    const long stretch = tiles == 1 ? std::max(depth, 1L) : kDepth;
    for (int b = 0; b < block.count; b += step) {
      const bool last = b + step >= block.count;
      const uint8_t* panels[kBlock];
      for (int p = 0; p < step; ++p) panels[p] = w.panel(block.panel[b + p]);
      for (long part = 0; part < a.splits; ++part) {
        const long k0 = part * depth, k1 = k0 + depth;
        Ahead ahead = last ? fetch(following, 0, step, k0, k1, tiles * depth)
                           : fetch(&block, b + step, step, k0, k1, tiles * depth);
        for (long k = k0; k == k0 || k < k1; k += stretch) {
          const long end = std::min(k + stretch, k1);
          for (long t = 0; t < tiles; ++t) {
            const long r0 = t * block.rows / tiles, r1 = (t + 1) * block.rows / tiles;
            float* c = sums + (part * block.rows + r0) * kWidth + b * 16;
            direct_tile(w.storage, int(r1 - r0))(w, panels, a.x + (block.row0 + r0) * a.ldx,
                                                 a.ldx, k, end, c, kWidth, k != k0, ahead);
            if (last && end == k1 && part + 1 == a.splits) finish(block, r0, r1, sums);
          }
        }
      }
    }
  }

  void sum_many(const Block& block, const Block* following, long part, float* sums) const {
    alignas(64) thread_local float wide[kWidePanels][kDepth * 16];
    const long tiles = (block.rows + kWideRows - 1) / kWideRows;
    const long depth = w.k / a.splits, k0 = part * depth, k1 = k0 + depth;
    const long stretches = std::max(1L, (depth + kDepth - 1) / kDepth);
    const long stretch = std::max(8L, round_up((depth + stretches - 1) / stretches, 8));
    for (long k = k0; k == k0 || k < k1; k += stretch) {
      const long end = std::min(k + stretch, k1), steps = tiles * (end - k);
      for (int b = 0; b < block.count; b += kWidePanels) {
        const int used = std::min(kWidePanels, block.count - b);
        const bool last = b + kWidePanels >= block.count;
        const bool ready = last && end == k1 && part + 1 == a.splits;
        const uint8_t* panels[kWidePanels];
        for (int p = 0; p < kWidePanels; ++p) {
          const long panel = block.panel[b + p];
          const float* whole = fp32_panel(panel);
          panels[p] = (const uint8_t*)(whole ? whole + k * 16 : wide[p]);
          if (!whole && p < used) widen(w, panel, k, end, wide[p]);
        }
        Ahead ahead = !last      ? fetch(&block, b + used, kWidePanels, k, end, steps)
                      : end < k1 ? fetch(&block, 0, kWidePanels, end, end + stretch, steps)
                                 : fetch(following, 0, kWidePanels, k0, k0 + stretch, steps);
        for (long t = 0; t < tiles; ++t) {
          const long r0 = t * block.rows / tiles, r1 = (t + 1) * block.rows / tiles;
          float* c = sums + (part * block.rows + r0) * kWidth + b * 16;
          if (ready) fetch_outputs(block, r0, r1);
          wide_tile(int(r1 - r0), used)(w, panels, a.x + (block.row0 + r0) * a.ldx + k, a.ldx, 0,
                                        end - k, c, kWidth, k != k0, ahead);
          if (ready) finish(block, r0, r1, sums);
        }
      }
    }
  }

  // Weights k0..k1 of n panels of a block from its b-th, to come in while `steps` k are computed.
  Ahead fetch(const Block* block, int b, int n, long k0, long k1, long steps) const {
    Ahead ahead;
    if (!block || (w.plain() && !widened) || steps < 8) return ahead;
    k1 = std::min(k1, w.k);
    for (int p = 0; p < 4; ++p) {
      const long panel = block->panel[std::min(b + p % n, kBlock - 1)];
      ahead.from[p] = widened ? (const uint8_t*)(fp32_panel(panel) + k0 * 16)
                              : w.panel(panel) + w.offset(k0);
    }
    ahead.bytes = widened ? (k1 - k0) * 64 : w.offset(k1) - w.offset(k0);
    // Where reading is all there is, the processor goes faster alone once each stream has begun.
    if (a.rows <= 6) ahead.bytes = k0 ? 0 : std::min(ahead.bytes, 1024L);
    ahead.lines = int((n * ahead.bytes / 64 + steps / 8 - 1) / (steps / 8));
    return ahead;
  }

  // The outputs of a block's rows r0 .. r1 - 1 are about to be written.
  void fetch_outputs(const Block& block, long r0, long r1) const {
    const long width = gated ? w.half_rows : w.n;
    for (long r = r0; r < r1; ++r)
      for (int b = 0; b < block.count; b += unit_panels) {
        __builtin_prefetch(a.y + (block.row0 + r) * width + block.row[b], 1);
        if (a.residual)
          __builtin_prefetch(a.residual + (block.row0 + r) * a.ld_residual + block.row[b]);
      }
  }

  // Parts lo .. hi - 1 of one vector of sums, `stride` apart; the left half takes the odd one.
  static f32x16 tree(const float* c, long stride, long lo, long hi) {
    if (hi - lo == 1) return load(c + lo * stride);
    const long mid = lo + (hi - lo + 1) / 2;
    return tree(c, stride, lo, mid) + tree(c, stride, mid, hi);
  }

  // Outputs of the block's rows r0 .. r1 - 1.
  void finish(const Block& block, long r0, long r1, const float* sums) const {
    const long* row = block.row;
    const long* lanes = block.lanes;
    for (long r = r0; r < r1; ++r) {
      const float* c = sums + r * kWidth;
      f32x16 v[kBlock];
      for (int b = 0; b < block.count; ++b) {
        v[b] = a.splits == 1 ? load(c + b * 16)
                             : tree(c + b * 16, block.rows * kWidth, 0, a.splits);
        if (a.bias) v[b] = v[b] + load_n(a.bias + row[b], lanes[b]);
      }
      if (gated) {
        float* y = a.y + (block.row0 + r) * w.half_rows;
        for (int b = 0; b < block.count; b += 2)
          store_n(y + row[b], lanes[b], activate(v[b], a.activation) * v[b + 1]);
        continue;
      }
      const float* residual = a.residual + (block.row0 + r) * a.ld_residual;
      for (int b = 0; b < block.count; ++b) {
        if (a.residual) v[b] = load_n(residual + row[b], lanes[b]) + v[b];
        store_n(a.y + (block.row0 + r) * w.n + row[b], lanes[b], v[b]);
      }
    }
  }

  const KtLinearArgs& a;
  const Layout w;
  const bool gated;
  const long units;
  const int unit_panels;
  const long row_blocks, block_rows;
  bool direct;
  long first_unit = 0;             // of the segment at work
  const float* widened = nullptr;  // its panels as fp32
};

}  // namespace
}  // namespace kt

extern "C" void kt_linear(const kt::KtLinearArgs* a) { kt::Linear(*a).run(); }
