// y = x W^T (+ bias) (+ residual), or activation(gate) * up over the two halves of W.
//
// The law: y[t][n] is one chain of fma over k = 0..K-1 from zero (with `splits` V: one chain per
// equal part of K, the parts added in a balanced tree), then + bias, then residual +. Rows, tiles,
// threads and storage decide only who computes it and when. `halved`, x and W are rounded to bf16
// first and the chain takes k in the order of pairs.h.
//
// Work is cut along the outputs into panels and, for many rows, along the rows. A thread takes a
// run of panels, then for each block of four panels:
//
//   few rows    one pass over k straight from the packed weights, all sums in registers
//   many rows   for each stretch of k: weights as words in L1 (made into scratch unless they lie
//               so), then every tile of up to six rows over them
//
// A word is an fp32 number, or, halved and where the processor has the instruction, a pair of bf16.
// Where there are several blocks of rows, weights that are not panels of words are made such once
// for all of them, a segment of a few megabytes at a time.
//
// The sums land in a scratch [rows][64]; the epilogue turns them into outputs.
#include <atomic>

#include "activation.h"
#include "linear_tile.h"
#include "pool.h"
#include "scratch.h"

namespace kt {

struct KtLinearArgs {
  const void* x;          // [rows][ldx], k used; fp32, or bf16 if x_bf16
  const float* bias;      // [n] or null
  const float* residual;  // [rows][ld_residual] or null
  float* y;               // [rows][n], gated: [rows][n / 2]
  int64_t rows, ldx, ld_residual;
  KtMatrix w;
  int32_t splits, activation;  // activation -1: not gated
  int32_t halved, x_bf16;      // x may be bf16 where halved
};

namespace {

constexpr int kBlock = 4;          // panels in a block
constexpr int kWidth = kBlock * 16;
constexpr long kRowBlock = 96;     // most rows of a block: they and their sums stay in L2
constexpr long kSegment = 1 << 20;  // words of weights made for all rows: they stay in L3
#if KT_AVX512
constexpr long kDepth = 128;       // stretch of words: four panels of it are 32 KB
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
        block_rows(round_up((a.rows + row_blocks - 1) / std::max(row_blocks, 1L), kTileRows)),
        halved(a.halved), step(halved ? kPairStep : 1), depth(w.k / a.splits),
        span((depth + step - 1) / step), words(a.splits * span), x((const float*)a.x),
        ldx(a.ldx) {
    const bool aligned = !w.grouped() || a.splits == 1 || depth % w.group == 0;
    direct = !w.plain() && aligned && depth % step == 0 && read_directly(w.storage, a.rows);
  }

  void run() {
    if (!units || !a.rows) return;
    thread_local Scratch rounded, scratch;
    if (halved) halve_rows(rounded);
    if (lies_as_words() || row_blocks == 1 || !w.k) return run_units(units);
    const long unit_words = unit_panels * words * 16;
    const long most = std::clamp(kSegment / unit_words, long(kBlock), units);
    float* memory = scratch.get(most * unit_words);
    for (long count; first_unit < units; first_unit += count) {
      count = std::min(most, units - first_unit);
      parallel_for(count * unit_panels, [&](long i, int) {
        const FlushTiny flush(halved);
        const long panel = first_unit + i / unit_panels + i % unit_panels * w.half_panels;
        for (long part = 0; part < a.splits; ++part)
          make_words(panel, part, 0, span, memory + (i * words + part * span) * 16);
      });
      made = memory;
      run_units(count);
    }
  }

 private:
  // x as the halved kernels take it: each part's words, then the next part's.
  void halve_rows(Scratch& scratch) {
    if (KT_PAIRS && a.x_bf16 && depth % 2 == 0 && a.ldx % 2 == 0) {
      ldx = a.ldx / 2;
      return;
    }
    ldx = words;
    float* out = scratch.get(a.rows * words);
    x = out;
    const long most = std::max(1L, 32768 / std::max(w.k, 1L));
    parallel_for((a.rows + most - 1) / most, [&](long i, int) {
      const long end = std::min((i + 1) * most, a.rows);
      for (long r = i * most; r < end; ++r)
        for (long part = 0; part < a.splits; ++part) {
          const long at = r * a.ldx + part * depth;
          float* row = out + r * words + part * span;
          if (a.x_bf16)
            halve_row((const bf16*)a.x + at, depth, row);
          else
            halve_row((const float*)a.x + at, depth, row);
        }
    });
  }

  // Words u0..u1 of one part of a panel.
  void make_words(long panel, long part, long u0, long u1, float* out) const {
    const long k0 = part * depth + u0 * step, k1 = part * depth + std::min(u1 * step, depth);
    if (halved)
      halve(w, panel, k0, k1, out);
    else
      widen(w, panel, k0, k1, out);
  }

  bool lies_as_words() const { return w.storage == kFp32 && !halved; }

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
      const FlushTiny flush(halved);
      Block block, following;
      for (bool more = claim(block); more; block = following) {
        more = claim(following);  // one block early: its weights are fetched meanwhile
        run_block(block, more ? &following : nullptr);
      }
    });
  }

  // A panel's words, part after part, if they are there, else null.
  const float* panel_words(long panel) const {
    if (lies_as_words()) return (const float*)w.panel(panel);
    if (!made) return nullptr;
    const long unit = gated ? panel % w.half_panels : panel, half = gated ? panel / w.half_panels : 0;
    return made + ((unit - first_unit) * unit_panels + half) * words * 16;
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
    const int wide = tile_panels(int((block.rows + tiles - 1) / tiles));
    const long stretch = tiles == 1 ? std::max(span, 1L) : kDepth;
    const auto choose = halved ? halved_tile : direct_tile;
    for (int b = 0; b < block.count; b += wide) {
      const bool last = b + wide >= block.count;
      const uint8_t* panels[kBlock];
      for (int p = 0; p < wide; ++p) panels[p] = w.panel(block.panel[b + p]);
      for (long part = 0; part < a.splits; ++part) {
        const long u0 = part * span, u1 = u0 + span;
        Ahead ahead = last ? fetch(following, 0, wide, u0, u1, tiles * span)
                           : fetch(&block, b + wide, wide, u0, u1, tiles * span);
        for (long u = u0; u == u0 || u < u1; u += stretch) {
          const long end = std::min(u + stretch, u1);
          for (long t = 0; t < tiles; ++t) {
            const long r0 = t * block.rows / tiles, r1 = (t + 1) * block.rows / tiles;
            float* c = sums + (part * block.rows + r0) * kWidth + b * 16;
            choose(w.storage, int(r1 - r0))(w, panels, x + (block.row0 + r0) * ldx, ldx, u * step,
                                            end * step, c, kWidth, u != u0, ahead);
            if (last && end == u1 && part + 1 == a.splits) finish(block, r0, r1, sums);
          }
        }
      }
    }
  }

  void sum_many(const Block& block, const Block* following, long part, float* sums) const {
    alignas(64) thread_local float wide[kWidePanels][kDepth * 16];
    const long tiles = (block.rows + kWideRows - 1) / kWideRows;
    const long u0 = part * span, u1 = u0 + span;
    const long stretches = std::max(1L, (span + kDepth - 1) / kDepth);
    const long stretch = std::max(8L, round_up((span + stretches - 1) / stretches, 8));
    for (long u = u0; u == u0 || u < u1; u += stretch) {
      const long end = std::min(u + stretch, u1), steps = tiles * (end - u);
      for (int b = 0; b < block.count; b += kWidePanels) {
        const int used = std::min(kWidePanels, block.count - b);
        const bool last = b + kWidePanels >= block.count;
        const bool ready = last && end == u1 && part + 1 == a.splits;
        const uint8_t* panels[kWidePanels];
        for (int p = 0; p < kWidePanels; ++p) {
          const long panel = block.panel[b + p];
          const float* whole = panel_words(panel);
          panels[p] = (const uint8_t*)(whole ? whole + u * 16 : wide[p]);
          if (!whole && p < used) make_words(panel, part, u - u0, end - u0, wide[p]);
        }
        Ahead ahead = !last      ? fetch(&block, b + used, kWidePanels, u, end, steps)
                      : end < u1 ? fetch(&block, 0, kWidePanels, end, end + stretch, steps)
                                 : fetch(following, 0, kWidePanels, u0, u0 + stretch, steps);
        for (long t = 0; t < tiles; ++t) {
          const long r0 = t * block.rows / tiles, r1 = (t + 1) * block.rows / tiles;
          float* c = sums + (part * block.rows + r0) * kWidth + b * 16;
          if (ready) fetch_outputs(block, r0, r1);
          wide_tile(int(r1 - r0), used, halved)(w, panels, x + (block.row0 + r0) * ldx + u, ldx, 0,
                                                end - u, c, kWidth, u != u0, ahead);
          if (ready) finish(block, r0, r1, sums);
        }
      }
    }
  }

  // Words u0..u1 of n panels of a block from its b-th, to come in while `steps` of them are used.
  Ahead fetch(const Block* block, int b, int n, long u0, long u1, long steps) const {
    Ahead ahead;
    if (!block || (w.plain() && !made) || steps < 8) return ahead;
    u1 = std::min(u1, words);
    const long first = w.offset(u0 * step), end = w.offset(std::min(u1 * step, w.k));
    for (int p = 0; p < 4; ++p) {
      const long panel = block->panel[std::min(b + p % n, kBlock - 1)];
      ahead.from[p] = made ? (const uint8_t*)(panel_words(panel) + u0 * 16) : w.panel(panel) + first;
    }
    ahead.bytes = made ? (u1 - u0) * 64 : end - first;
    // Where reading is all there is, the processor goes faster alone once each stream has begun.
    if (a.rows <= 6) ahead.bytes = u0 ? 0 : std::min(ahead.bytes, 1024L);
    // A step of the tiles that read directly is eight k.
    const long places = std::max(direct ? steps * step / 8 : steps / 8, 1L);
    ahead.lines = int((n * ahead.bytes / 64 + places - 1) / places);
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
  const bool halved;
  const long step;                // k in a word
  const long depth, span, words;  // k of a part, words of a part, words of all
  const float* x;                 // as the kernels take it
  long ldx;
  bool direct;
  long first_unit = 0;          // of the segment at work
  const float* made = nullptr;  // its panels' words
};

}  // namespace
}  // namespace kt

extern "C" void kt_linear(const kt::KtLinearArgs* a) { kt::Linear(*a).run(); }
