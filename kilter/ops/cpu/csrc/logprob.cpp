// Log-softmax over the vocabulary, whole or at one target per row, and argmax.
//
// A row is cut into chunks of 4096 that any thread may take. Every chunk's sum of exponentials is
// taken in fixed lanes about the row's maximum, and the chunks are added in order in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

struct KtLogprobArgs {
  const float* logits;     // [rows, vocab], rows stride apart
  const int64_t* targets;  // kt_token_logprobs: [rows]
  float* out;              // [rows, vocab], or [rows]
  int32_t* status;         // set to 1 for a target outside the vocabulary
  int64_t rows, vocab, stride;
};

struct KtArgmaxArgs {
  const float* logits;  // [rows, vocab], rows stride apart
  int64_t* out;         // [rows]
  int64_t rows, vocab, stride;
};

namespace kt {
namespace {

constexpr long kChunk = 4096;

float chunk_max(const float* x, long n) {
  f32x16 m = set1(-INFINITY);
  long i = 0;
  for (; i + 16 <= n; i += 16) m = max(m, load(x + i));
  if (i < n) m = max(m, load_n(x + i, n - i, -INFINITY));
  return reduce_max(m);
}

float chunk_sum(const float* x, long n, float row_max) {
  const f32x16 shift = set1(row_max);
  f32x16 sum[2] = {zero(), zero()};
  long i = 0;
  for (; i + 32 <= n; i += 32) {
    sum[0] = sum[0] + exp(load(x + i) - shift);
    sum[1] = sum[1] + exp(load(x + i + 16) - shift);
  }
  for (int j = 0; i < n; i += 16, ++j) {
    f32x16 e = exp(load_n(x + i, n - i) - shift);
    float t[16];
    store(t, e);
    for (long k = n - i; k < 16; ++k) t[k] = 0.0f;
    sum[j] = sum[j] + load(t);
  }
  return reduce_add(sum[0] + sum[1]);
}

// Log of the sum of exponentials of every row.
void log_sum_exp(const KtLogprobArgs* a, std::vector<double>& lse) {
  const long chunks = (a->vocab + kChunk - 1) / kChunk;
  thread_local std::vector<float> part, top;
  part.resize(a->rows * chunks);
  top.resize(a->rows);
  float *p = part.data(), *m = top.data();
  const auto span = [=](long task, long& n) {
    const long start = (task % chunks) * kChunk;
    n = std::min(kChunk, a->vocab - start);
    return a->logits + (task / chunks) * a->stride + start;
  };
  parallel_for(a->rows * chunks, [=](long task, int) {
    long n;
    const float* x = span(task, n);
    p[task] = chunk_max(x, n);
  });
  for (long t = 0; t < a->rows; ++t) {
    m[t] = p[t * chunks];
    for (long c = 1; c < chunks; ++c) m[t] = std::max(m[t], p[t * chunks + c]);
  }
  parallel_for(a->rows * chunks, [=](long task, int) {
    long n;
    const float* x = span(task, n);
    p[task] = chunk_sum(x, n, m[task / chunks]);
  });
  lse.resize(a->rows);
  for (long t = 0; t < a->rows; ++t) {
    double sum = 0.0;
    for (long c = 0; c < chunks; ++c) sum += double(p[t * chunks + c]);
    lse[t] = double(m[t]) + std::log(sum);
  }
}

// First index of the largest element; a NaN is larger than everything, as torch has it.
long chunk_argmax(const float* x, long n) {
  const float m = chunk_max(x, n);
  for (long i = 0; i < n; ++i)
    if (x[i] == m || std::isnan(x[i])) {
      if (std::isnan(x[i])) return i;
      for (long j = i + 1; j < n; ++j)
        if (std::isnan(x[j])) return j;
      return i;
    }
  return 0;
}

}  // namespace
}  // namespace kt

extern "C" void kt_log_softmax(const KtLogprobArgs* a) {
  using namespace kt;
  thread_local std::vector<double> lse;
  log_sum_exp(a, lse);
  const double* shift = lse.data();
  const long chunks = (a->vocab + kChunk - 1) / kChunk;
  parallel_for(a->rows * chunks, [=](long task, int) {
    const long t = task / chunks, start = (task % chunks) * kChunk;
    const long n = std::min<long>(kChunk, a->vocab - start);
    const float* x = a->logits + t * a->stride + start;
    float* out = a->out + t * a->vocab + start;
    for (long i = 0; i < n; ++i) out[i] = float(double(x[i]) - shift[t]);
  });
}

extern "C" void kt_token_logprobs(const KtLogprobArgs* a) {
  using namespace kt;
  thread_local std::vector<double> lse;
  log_sum_exp(a, lse);
  for (long t = 0; t < a->rows; ++t) {
    const int64_t target = a->targets[t];
    if (target < 0 || target >= a->vocab) {
      *a->status = 1;
      a->out[t] = NAN;
    } else {
      a->out[t] = float(double(a->logits[t * a->stride + target]) - lse[t]);
    }
  }
}

extern "C" void kt_argmax(const KtArgmaxArgs* a) {
  using namespace kt;
  const long chunks = (a->vocab + kChunk - 1) / kChunk;
  thread_local std::vector<long> best;
  best.resize(a->rows * chunks);
  long* b = best.data();
  parallel_for(a->rows * chunks, [=](long task, int) {
    const long start = (task % chunks) * kChunk;
    const float* x = a->logits + (task / chunks) * a->stride + start;
    b[task] = start + chunk_argmax(x, std::min<long>(kChunk, a->vocab - start));
  });
  for (long t = 0; t < a->rows; ++t) {
    const float* x = a->logits + t * a->stride;
    long top = b[t * chunks];
    for (long c = 1; c < chunks; ++c) {
      const long i = b[t * chunks + c];
      if (!std::isnan(x[top]) && (std::isnan(x[i]) || x[i] > x[top])) top = i;
    }
    a->out[t] = top;
  }
}
