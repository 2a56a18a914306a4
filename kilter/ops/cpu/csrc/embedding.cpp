// Rows of a weight matrix, as fp32, times a scale.
#include "formats.h"
#include "pool.h"

namespace kt {

struct KtEmbedArgs {
  const int64_t* tokens;  // [rows]
  float* out;             // [rows][k]
  int64_t* bad;           // out: place of the first id outside 0..n-1, or -1 (then out is written)
  int64_t rows;
  KtMatrix w;
  float scale;
};

namespace {

constexpr long kRun = 128;  // k at a time

template <class T>
void plain_row(const T* row, long k, float scale, float* out) {
  for (long i = 0; i < k; i += 16) store_n(out + i, k - i, load_n(row + i, k - i) * set1(scale));
}

void packed_row(const Layout& w, long token, float scale, float* out) {
  const long half = token / w.half_rows, place = token % w.half_rows;
  const long panel = half * w.half_panels + place / 16, lane = place % 16;
  alignas(64) float values[kRun * 16];
  for (long k = 0; k < w.k; k += kRun) {
    const long n = std::min(kRun, w.k - k);
    widen(w, panel, k, k + n, values);
    for (long i = 0; i < n; ++i) out[k + i] = values[i * 16 + lane] * scale;
  }
}

}  // namespace
}  // namespace kt

extern "C" void kt_embed(const kt::KtEmbedArgs* a) {
  using namespace kt;
  for (long t = 0; t < a->rows; ++t) {
    if (a->tokens[t] < 0 || a->tokens[t] >= a->w.n) {
      *a->bad = t;
      return;
    }
  }
  *a->bad = -1;
  const Layout w(a->w);
  auto row = [&](long t, int) {
    const long token = a->tokens[t];
    float* out = a->out + t * w.k;
    switch (w.storage) {
      case kPlainFp32: return plain_row((const float*)w.data + token * w.stride_n, w.k, a->scale, out);
      case kPlainBf16: return plain_row((const bf16*)w.data + token * w.stride_n, w.k, a->scale, out);
      case kPlainFp16: return plain_row((const f16*)w.data + token * w.stride_n, w.k, a->scale, out);
      default: return packed_row(w, token, a->scale, out);
    }
  };
  if (a->rows * w.k < 65536)
    for (long t = 0; t < a->rows; ++t) row(t, 0);
  else
    parallel_for(a->rows, row);
}
